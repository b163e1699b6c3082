// Attention over latent rows that are FP8 codes with scales of powers of two, for queries of bf16: as
// latent_attention.h, but codes become numbers between the products that hide it. Values are not
// written at all.
//
// Even and odd codes of 32 words become bf16 apart: a shift, or two, brings exponent and mantissa into
// place, and the scale is added to the exponent. Queries and sums have that order too; sums are put
// in order at the end. Codes and scales for which that is not so (zeros, subnormal, NaN) are looked up,
// 64 codes of two rows at a time.
//
// On Zen 4 shifts, logic and loads cost nothing beside the products, but a store of a whole vector
// takes the place of one, two of half a vector don't.
#pragma once
#include "attention_lanes.h"
#include "latent_attention.h"

#if GC_RECORDS_AS_BF16

namespace {
using namespace gc;

constexpr int PAIR_ROWS = ROWS / 2;

// Where the parts of a record lie.
struct CodeLayout {
  static constexpr int MOST = 16, GROUPS = 2, SCALES = 4 * GROUPS;
  int vectors = 0, plain = 0;  // vectors of 64 codes, and of 32 bf16 behind them
  int code[MOST], scale[MOST];     // bytes before the codes of a vector; the number of its scale
  int at[MOST];                    // bytes before the bf16 of a vector
  int groups = 0, group[GROUPS];   // bytes before up to four scales
  __mmask8 some[GROUPS];           // which there are

  // False where records are others than this can do.
  bool set(const gc_record_format& f, int64_t latent) {
    if (f.group != 1 || f.segment[0].kind != FP8_POW2 || latent > f.segment[0].width || latent % 64)
      return false;
    int64_t bytes = 0;
    for (int64_t k = 0; k < f.segments; k++) {
      const gc_segment& s = f.segment[k];
      if (s.kind == FP8_POW2 ? !add_codes(s, bytes) : !add_plain(s, bytes)) return false;
      bytes += segment_bytes(s);
    }
    return true;
  }

 private:
  bool add_codes(const gc_segment& s, int64_t bytes) {
    if (plain > 0 || s.width % 64 || vectors + s.width / 64 > MOST) return false;
    const int64_t scales = scale_count(s);
    if (groups + (scales + 3) / 4 > GROUPS) return false;
    for (int64_t i = 0; i < s.width; i += 64) {
      code[vectors] = (int)(bytes + i);
      scale[vectors++] = (int)(4 * groups + i / FP8_TILE);
    }
    for (int64_t i = 0; i < scales; i += 4) {
      some[groups] = (__mmask8)((1 << min64(4, scales - i)) - 1);
      group[groups++] = (int)(bytes + s.width + 4 * i);
    }
    return true;
  }
  bool add_plain(const gc_segment& s, int64_t bytes) {
    if (s.kind != PLAIN_BF16 || s.width % 32 || plain + s.width / 32 > MOST) return false;
    for (int64_t i = 0; i < s.width; i += 32) at[plain++] = (int)(bytes + 2 * i);
    return true;
  }
};

// Codes to numbers, with what compilers would load again and again in registers.
struct CodeNumbers {
  __m512i bits = _mm512_set1_epi16((short)0x87f0), first = _mm512_set1_epi8(16),
          range = _mm512_set1_epi8((char)236);
  inline __attribute__((always_inline)) CodeNumbers() {
    asm("" : "+v"(bits), "+v"(first), "+v"(range));
  }
  inline __attribute__((always_inline)) __m512i odd(__m512i codes, __m512i bias) const {
    return _mm512_add_epi16(_mm512_and_si512(_mm512_srai_epi16(codes, 4), bits), bias);
  }
  inline __attribute__((always_inline)) __m512i even(__m512i codes, __m512i bias) const {
    return odd(_mm512_slli_epi16(codes, 8), bias);
  }
  inline __attribute__((always_inline)) __m256i odd(__m256i codes, __m256i bias) const {
    const __m256i low = _mm512_castsi512_si256(bits);
    return _mm256_add_epi16(_mm256_and_si256(_mm256_srai_epi16(codes, 4), low), bias);
  }
  inline __attribute__((always_inline)) __m256i even(__m256i codes, __m256i bias) const {
    return odd(_mm256_slli_epi16(codes, 8), bias);
  }
  // As above_normal and beyond.
  inline __attribute__((always_inline)) __m512i above(__m512i codes) const {
    return _mm512_sub_epi8(_mm512_add_epi8(codes, codes), first);
  }
  inline __attribute__((always_inline)) __m256i above(__m256i codes) const {
    return _mm256_sub_epi8(_mm256_add_epi8(codes, codes), _mm512_castsi512_si256(first));
  }
  inline __attribute__((always_inline)) bool irregular(__m512i above) const {
    return _mm512_cmpgt_epu8_mask(above, range) != 0;
  }
  inline __attribute__((always_inline)) bool irregular(__m256i above) const {
    return _mm256_cmpgt_epu8_mask(above, _mm512_castsi512_si256(range)) != 0;
  }
  inline __attribute__((always_inline)) __m512i any_even(__m512i codes, __m512i bias) const {
    return any(_mm512_and_si512(codes, _mm512_set1_epi16(0xff)), even(codes, bias), bias);
  }
  inline __attribute__((always_inline)) __m512i any_odd(__m512i codes, __m512i bias) const {
    return any(_mm512_srli_epi16(codes, 8), odd(codes, bias), bias);
  }

 private:
  // What all codes are, given what they are if they are normal numbers.
  static inline __attribute__((always_inline))
  __m512i any(__m512i codes, __m512i normal, __m512i bias) {
    // 2^-9 times 0 to 7 without the bias of their exponents and that of E4M3
    const __m128i powers = _mm_set_epi16(0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0);
    const __m512i steps = _mm512_zextsi128_si512(_mm_sub_epi16(powers, _mm_set1_epi16(120 << 7)));
    const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
    __m512i v = _mm512_mask_add_epi16(normal, small, _mm512_permutexvar_epi16(codes, steps), bias);
    v = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(codes, magnitude), v);
    v = _mm512_mask_mov_epi16(v, nan, _mm512_set1_epi16(0x7fc0));
    const __m512i sign = _mm512_set1_epi16((short)0x8000);
    return _mm512_ternarylogic_epi32(v, _mm512_slli_epi16(codes, 8), sign, 0xf8);
  }
};

// The codes of a block of rows.
struct CodeBlock {
  CodeLayout layout;
  bf16* made;  // [2][even 32, odd 32] of each vector of two rows that is looked up, as they come
  uint64_t late[CodeLayout::MOST];  // which pairs those are, of each vector
  uint16_t place[CodeLayout::MOST][PAIR_ROWS], places;  // where in `made`, and how many there are
  // What is added to the numbers of a pair of rows, for each scale; that of the first in the lower half.
  alignas(64) uint32_t bias[PAIR_ROWS][CodeLayout::SCALES];
  E4m3Magnitudes all;

  // Bias of the rows [j, j + SCORE_ROWS); whether they have scales that nothing can be added for.
  inline __attribute__((always_inline)) bool set_bias(const uint8_t* const* rows, int64_t j) {
    const __m128i one = _mm_set1_epi32(127 << 23), least = _mm_set1_epi32(16 << 23);
    const __m128i by = _mm_set1_epi16(7 << 7);
    __m128i bits = _mm_setzero_si128(), above = bits;
    for (int g = 0; g < layout.groups; g++) {
      const __mmask8 some = layout.some[g];
#pragma GCC unroll 4
      for (int r = 0; r < SCORE_ROWS; r += 2) {
        const __m128i x = _mm_mask_loadu_epi32(one, some, rows[j + r] + layout.group[g]);
        const __m128i y = _mm_mask_loadu_epi32(one, some, rows[j + r + 1] + layout.group[g]);
        bits = _mm_or_si128(bits, _mm_or_si128(x, y));
        above = _mm_max_epu32(above, _mm_max_epu32(_mm_sub_epi32(x, least), _mm_sub_epi32(y, least)));
        const __m128i both = _mm_blend_epi16(_mm_srli_epi32(x, 16), y, 0xaa);
        _mm_store_si128((__m128i*)(bias[(j + r) / 2] + 4 * g), _mm_sub_epi16(both, by));
      }
    }
    return (_mm_test_epi32_mask(bits, _mm_set1_epi32((int)0x807fffff)) |
            _mm_cmpge_epu32_mask(above, _mm_set1_epi32(224 << 23))) != 0;
  }
  const int16_t* bias_of(int64_t j, int v) const {
    return (const int16_t*)(bias[j / 2] + layout.scale[v]) + j % 2;
  }

  bf16* numbers(int64_t j, int v) const { return made + (place[v][j / 2] * 2 + j % 2) * 64; }
  void begin() {
    places = 0;
    for (int v = 0; v < layout.vectors; v++) late[v] = 0;
  }
  // Makes room for vector v of the rows j and j + 1, which others may take where it is not `looked_up`.
  void add_late(int64_t j, int v, bool looked_up) {
    late[v] |= (uint64_t)looked_up << j / 2;
    place[v][j / 2] = places;
    places += looked_up;
  }

  // Vector v of the rows j and j + 1, whatever their codes, and their scales if STRANGE; also to `to`.
  template <bool STRANGE>
  inline __attribute__((always_inline))
  void look_up(const uint8_t* const* rows, int64_t j, int v, bf16* to) {
    const CodeNumbers made;
    add_late(j, v, true);
    bf16* const late_at = numbers(j, v);
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; i++) {
      const uint8_t* const row = rows[j + i];
      const __m512i codes = _mm512_loadu_si512(row + layout.code[v]);
      const int k = layout.scale[v];
      const auto scale = [&] { return load<uint32_t>(row + layout.group[k / 4] + k % 4 * 4); };
      __m512i even, odd;
      if (!STRANGE || __builtin_expect(gc::bias_of(scale()) != 0, 1)) {
        const __m512i bias = _mm512_set1_epi16(*bias_of(j + i, v));
        even = made.any_even(codes, bias);
        odd = made.any_odd(codes, bias);
      } else {
        const E4m3Table table(all, bits_to_f32(scale()));
        even = table(_mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8));
        odd = table(_mm512_srai_epi16(codes, 8));
      }
      _mm512_storeu_si512(to + i * 64, even);
      _mm512_storeu_si512(to + i * 64 + 32, odd);
      _mm512_storeu_si512(late_at + i * 64, even);
      _mm512_storeu_si512(late_at + i * 64 + 32, odd);
    }
  }
};

// Sums of even columns of four words in each quarter, and odd ones, then those of the other four.
struct CodeColumns {
  static constexpr int64_t count = 64;
  static void order(const float* o, vf (&v)[4]) {
    const __m512 a = _mm512_loadu_ps(o), b = _mm512_loadu_ps(o + VL), c = _mm512_loadu_ps(o + 2 * VL),
                 d = _mm512_loadu_ps(o + 3 * VL);
    alignas(64) float to[4 * VL];
    put_quarters((__m512i)_mm512_unpacklo_ps(a, b), (__m512i)_mm512_unpackhi_ps(a, b),
                 (__m512i)_mm512_unpacklo_ps(c, d), (__m512i)_mm512_unpackhi_ps(c, d),
                 (uint32_t*)to, VL);
    for (int i = 0; i < 4; i++) v[i] = load<vf>(to + i * VL);
  }
};

// Where half a vector of heads meets rows, two of those are multiplied by each head's query in turn and
// the products added across; else heads are lanes, and eight rows are made into numbers while the
// 64 before are multiplied.
template <int P> struct LatentCodes : LatentAttention<bf16, Pairs, P, uint8_t, CodeColumns> {
  typedef LatentAttention<bf16, Pairs, P, uint8_t, CodeColumns> Base;
  using Base::change;
  using Base::ldo;
  using Base::LANES;
  using Base::out;
  using Base::q;
  using Base::rows;
  using Base::s;
  using Base::scores;
  typedef const uint8_t* const* Codes;

  CodeBlock block;
  CodeLayout& layout = block.layout;
  bf16* ring;  // [2][SCORE_ROWS][64]: vectors of a tile of rows
  int turn;    // which of them comes next
  uint8_t* kept;  // [lower, upper words of quarters][PAIR_ROWS][64]: codes of a vector, two rows in turn
  int64_t rest;  // lines of a tile of rows that are asked for with each vector, but for one a row

  explicit LatentCodes(const gc_args* a) : Base(a) {
    layout.set(s->form, s->latent);
    ring = rows.room();
    kept = (uint8_t*)(ring + 2 * SCORE_ROWS * 64);
    block.made = (bf16*)(kept + ROWS * 64);
    const int64_t lines = (s->form.bytes + 63) / 64 * SCORE_ROWS;
    rest = (lines + layout.vectors - 1) / layout.vectors - SCORE_ROWS;
  }

  void run(int64_t b, int64_t t, int64_t h0, int64_t heads, int64_t chunk) {
    load_query(this->query(b, t, h0), heads);
    this->start(b, t, chunk);
    for (int64_t n; (n = rows.next()) > 0;) {
      const Codes codes = rows.stored();
      block.begin();
      if constexpr (P == 1) {
        bool strange = begin_tiles(codes);
        for (int64_t j = 0; j < n; j += SCORE_ROWS)
          strange = score_tile(codes, j, j + SCORE_ROWS < n, strange, rows.ahead(j));
      } else {
        for (int64_t j = 0; j < n; j += SCORE_ROWS) {
          const bool strange = block.set_bias(codes, j);
          Coming coming = rows.ahead(j);
          for (int i = 0; i < SCORE_ROWS; i += 2) score_pair(codes, j + i, strange, coming);
        }
      }
      this->softmax(n);
      mix(codes, (n + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS / 2);
    }
    this->finish(b, t, h0, heads, chunk);
  }

  // P = 1: lanes [vectors][even 16, odd 16][VL], then those of the other numbers; else
  // [vectors][even, odd][LANES][32].
  void load_query(const bf16* x, int64_t heads) {
    const __m512i evens =
        _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                         22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_add_epi16(evens, _mm512_set1_epi16(1));
    int64_t i = 0;
    for (int v = 0; v < layout.vectors; v++, x += 64)
      for (int odd = 0; odd < 2; odd++, i += VL)
        put(i, heads, [&](int64_t h) __attribute__((always_inline)) {
          const bf16* const from = x + h * s->q_h;
          return _mm512_permutex2var_epi16(_mm512_loadu_si512(from), odd ? odds : evens,
                                           _mm512_loadu_si512(from + 32));
        });
    for (int v = 0; v < layout.plain; v++, x += 32, i += VL)
      put(i, heads, [&](int64_t h) __attribute__((always_inline)) {
        return _mm512_loadu_si512(x + h * s->q_h);
      });
  }
  template <class F> inline __attribute__((always_inline)) void put(int64_t i, int64_t heads, F get) {
    if constexpr (P == 1) {
      this->put_items(i, heads, get);
    } else {
      for (int64_t h = 0; h < LANES; h++)
        _mm512_storeu_si512(q + (i / VL * LANES + h) * VL,
                            h < heads ? this->with_sign(get(h)) : _mm512_setzero_si512());
    }
  }

  // -- heads in turn

  // sum[k * LANES + h] += q[h] . y[k]
  static inline __attribute__((always_inline)) void multiply(vf (&sum)[VL], const uint32_t*& x,
                                                             const __m512i (&y)[2]) {
#pragma GCC unroll 8
    for (int h = 0; h < 8; h++, x += VL) {
      const __m512i query = _mm512_loadu_si512(x);
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) sum[k * 8 + h] = times(sum[k * 8 + h], query, y[k]);
    }
  }
  __attribute__((noinline, cold)) void look_up(Codes codes, int64_t j, int v) {
    block.look_up<true>(codes, j, v, ring);
  }
  // N vectors of one scale, of rows j and j + 1.
  template <int N>
  inline __attribute__((always_inline)) void score_vectors(Codes codes, int64_t j, int v, bool strange,
                                                           const CodeNumbers& made, vf (&sum)[VL],
                                                           const uint32_t*& x, Coming& coming) {
    __m512i w[N][2], above[N];
#pragma GCC unroll 2
    for (int i = 0; i < N; i++) {
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) w[i][k] = _mm512_loadu_si512(codes[j + k] + layout.code[v + i]);
      above[i] = _mm512_max_epu8(made.above(w[i][0]), made.above(w[i][1]));
    }
    if (__builtin_expect(strange, 0)) {
      for (int i = v; i < v + N; i++) {
        look_up(codes, j, i);
        for (int half = 0; half < 64; half += 32) {
          coming.line();
          multiply(sum, x, {_mm512_loadu_si512(block.numbers(j, i) + half),
                            _mm512_loadu_si512(block.numbers(j + 1, i) + half)});
        }
      }
      return;
    }
    const __m512i bias[2] = {_mm512_set1_epi16(*block.bias_of(j, v)),
                             _mm512_set1_epi16(*block.bias_of(j + 1, v))};
    const __m512i most = N == 2 ? _mm512_max_epu8(above[0], above[N - 1]) : above[0];
    if (__builtin_expect(made.irregular(most), 0)) {
#pragma GCC unroll 2
      for (int i = 0; i < N; i++) {
        block.add_late(j, v + i, made.irregular(above[i]));
        bf16* const to = block.numbers(j, v + i);
        const __m512i even[2] = {made.any_even(w[i][0], bias[0]), made.any_even(w[i][1], bias[1])};
        const __m512i odd[2] = {made.any_odd(w[i][0], bias[0]), made.any_odd(w[i][1], bias[1])};
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
          _mm512_storeu_si512(to + 64 * k, even[k]);
          _mm512_storeu_si512(to + 64 * k + 32, odd[k]);
        }
        coming.line();
        multiply(sum, x, even);
        coming.line();
        multiply(sum, x, odd);
      }
      return;
    }
#pragma GCC unroll 2
    for (int i = 0; i < N; i++) {
      coming.line();
      multiply(sum, x, {made.even(w[i][0], bias[0]), made.even(w[i][1], bias[1])});
      coming.line();
      multiply(sum, x, {made.odd(w[i][0], bias[0]), made.odd(w[i][1], bias[1])});
    }
  }
  __attribute__((noinline)) void score_pair(Codes codes, int64_t j, bool strange, Coming& asked) {
    const CodeNumbers made;
    Coming coming = asked;
    vf sum[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) sum[i] = vf{};
    const uint32_t* x = q;
    for (int v = 0; v < layout.vectors;) {
      if (v + 1 < layout.vectors && layout.scale[v] == layout.scale[v + 1]) {
        score_vectors<2>(codes, j, v, strange, made, sum, x, coming);
        v += 2;
      } else {
        score_vectors<1>(codes, j, v, strange, made, sum, x, coming);
        v++;
      }
    }
    for (int v = 0; v < layout.plain; v++) {
      for (int64_t i = 0; i < rest; i++) coming.line();
      multiply(sum, x, {_mm512_loadu_si512(codes[j] + layout.at[v]),
                        _mm512_loadu_si512(codes[j + 1] + layout.at[v])});
    }
    store(scores + j * LANES, sum_each(sum));
    asked = coming;
  }

  // -- heads as lanes

  // How far codes are above normal ones, of rows two by two: those to look up are found without reading
  // them again.
  struct Above {
    __m256i pair[SCORE_ROWS / 2];

    inline __attribute__((always_inline)) void add(int r, __m256i above) {
      pair[r / 2] = r % 2 == 0 ? above : _mm256_max_epu8(pair[r / 2], above);
    }
    inline __attribute__((always_inline)) bool irregular(const CodeNumbers& made) const {
      return made.irregular(_mm256_max_epu8(_mm256_max_epu8(pair[0], pair[1]),
                                            _mm256_max_epu8(pair[2], pair[3])));
    }
    // Bit r: whether the rows r and r + 1 are to be looked up.
    inline __attribute__((always_inline)) uint32_t pairs(const CodeNumbers& made) const {
      uint32_t some = 0;
#pragma GCC unroll 4
      for (int r = 0; r < SCORE_ROWS; r += 2) some |= (uint32_t)made.irregular(pair[r / 2]) << r;
      return some;
    }
  };
  // A vector of row r by halves: a whole vector that is stored takes the place of a product.
  static inline __attribute__((always_inline)) void make(const uint8_t* from, const int16_t* by, bf16* to,
                                                         const CodeNumbers& made, int r, Above& above) {
    const __m256i bias = _mm256_set1_epi16(*by);
    __m256i most[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const __m256i codes = _mm256_loadu_si256((const __m256i*)(from + 32 * i));
      most[i] = made.above(codes);
      _mm256_storeu_si256((__m256i*)(to + 16 * i), made.even(codes, bias));
      _mm256_storeu_si256((__m256i*)(to + 32 + 16 * i), made.odd(codes, bias));
    }
    above.add(r, _mm256_max_epu8(most[0], most[1]));
  }
  // What `make` cannot: all rows if STRANGE, else those that `above` names, of which there is at least
  // one and seldom another.
  template <bool STRANGE>
  __attribute__((noinline)) void look_up(Codes codes, int64_t j, int v, const Above& above, bf16* to) {
    const CodeNumbers made;
    uint32_t some = STRANGE ? 0x55 : above.pairs(made);
    do {
      const int64_t i = __builtin_ctz(some);
      block.look_up<STRANGE>(codes, j + i, v, to + i * 64);
      some &= some - 1;
    } while (__builtin_expect(some != 0, STRANGE));
  }
  inline __attribute__((always_inline))
  void look_up(Codes codes, int64_t j, int v, bool strange, const Above& above, bf16* to) {
    if (strange)
      look_up<true>(codes, j, v, above, to);
    else
      look_up<false>(codes, j, v, above, to);
  }
  // The first vector of the first tile.
  bool begin_tiles(Codes codes) {
    const CodeNumbers made;
    turn = 0;
    const bool strange = block.set_bias(codes, 0);
    Above above;
    for (int r = 0; r < SCORE_ROWS; r++)
      make(codes[r] + layout.code[0], block.bias_of(r, 0), ring + r * 64, made, r, above);
    if (strange | above.irregular(made)) look_up(codes, 0, 0, strange, above, ring);
    return strange;
  }
  // Scores of the rows [j, j + SCORE_ROWS), the first vector of which is in the ring. Where there are
  // more, theirs is behind, and `strange` of them is returned; else that of these is made again, which
  // is cheaper than asking whether to.
  __attribute__((noinline))
  bool score_tile(Codes codes, int64_t j, bool more, bool strange, Coming coming) {
    const CodeNumbers made;
    vf acc[2][SCORE_ROWS] = {};  // as many chains as hide what numbers take from products
    const uint32_t* x = q;
    const int last = layout.vectors - 1;
    for (int v = 0; v <= last; v++, turn ^= 1) {
      const bf16* const from = ring + turn * SCORE_ROWS * 64;
      bf16* const to = ring + (turn ^ 1) * SCORE_ROWS * 64;
      const int next = v < last ? v + 1 : 0;
      int64_t to_row = j;
      if (v == last && more) strange = block.set_bias(codes, to_row = j + SCORE_ROWS);
      const Codes row = codes + to_row;
      const int64_t at = layout.code[next];
      const int16_t* const bias = block.bias_of(to_row, next);
      Above above;
#pragma GCC unroll 8
      for (int r = 0; r < SCORE_ROWS; r++) {
        coming.line();
#pragma GCC unroll 4
        for (int i = r * 4; i < r * 4 + 4; i++, x += VL) {
          const __m512i query = _mm512_loadu_si512(x);
#pragma GCC unroll 8
          for (int k = 0; k < SCORE_ROWS; k++)
            acc[i % 2][k] = times_item(acc[i % 2][k], (const uint32_t*)(from + k * 64) + i, query);
        }
        make(row[r] + at, bias + r / 2 * (2 * CodeLayout::SCALES) + r % 2, to + r * 64, made, r, above);
      }
      if (__builtin_expect(strange | above.irregular(made), 0) && (v < last || more))
        look_up(codes, to_row, next, strange, above, to);
      for (int64_t i = 0; i < rest; i++) coming.line();
    }
    for (int v = 0; v < layout.plain; v++) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++, x += VL) {
        const __m512i query = _mm512_loadu_si512(x);
#pragma GCC unroll 8
        for (int k = 0; k < SCORE_ROWS; k++)
          acc[i % 2][k] = times_item(acc[i % 2][k], (const uint32_t*)(codes[j + k] + layout.at[v]) + i, query);
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < SCORE_ROWS; k++) store(scores + (j + k) * LANES, acc[0][k] + acc[1][k]);
    return strange;
  }

  // -- values

  // Codes of two rows side by side, and by halves as above.
  static inline __attribute__((always_inline)) void keep(uint8_t* to, __m512i pair) {
    _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(pair));
    _mm256_storeu_si256((__m256i*)(to + 32), _mm512_extracti64x4_epi64(pair, 1));
  }
  // `out` of all heads, over half the columns of vector v: N of its even and odd ones, from PART on.
  // FIRST keeps the codes for those that read them AGAIN: rows lie across lines and in as many pages as
  // there are rows, more than a core has translations of at hand.
  enum Reads { ONCE, FIRST, AGAIN };
  template <bool HIGH, int PART, int N, Reads READS>
  __attribute__((noinline)) void mix_part(Codes codes, int64_t pairs, int v) {
    constexpr int H = VL / N;
    const CodeNumbers made;
    vf acc[N][H] = {};
    const uint32_t* const weights = (const uint32_t*)scores;
    const uint32_t* const bias = block.bias[0] + layout.scale[v];
    const int64_t at = layout.code[v];
    uint8_t* const pair = kept + HIGH * PAIR_ROWS * 64;
    const auto both = [](__m512i x, __m512i y) __attribute__((always_inline)) {
      return HIGH ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y);
    };
    const auto take = [&](int64_t j) __attribute__((always_inline)) {
      if (READS == AGAIN) return _mm512_loadu_si512(pair + j * 64);
      const __m512i x = _mm512_loadu_si512(codes[2 * j] + at);
      const __m512i y = _mm512_loadu_si512(codes[2 * j + 1] + at);
      if (READS == FIRST) {
        keep(kept + j * 64, _mm512_unpacklo_epi16(x, y));
        keep(kept + (PAIR_ROWS + j) * 64, _mm512_unpackhi_epi16(x, y));
      }
      return both(x, y);
    };
    const auto add = [&](int64_t j, __m512i even, __m512i odd) __attribute__((always_inline)) {
      const uint32_t* const w = weights + j * LANES;
#pragma GCC unroll 16
      for (int r = 0; r < H; r++) {
        if constexpr (N == 1) {
          acc[0][r] = times_item(acc[0][r], w + r, PART ? odd : even);
        } else {
          const __m512i all = _mm512_set1_epi32((int)w[r]);
          acc[0][r] = times(acc[0][r], all, even);
          acc[1][r] = times(acc[1][r], all, odd);
        }
      }
    };
    uint64_t late = block.late[v];
    for (int64_t j = 0;; j++) {
      for (const int64_t end = late ? __builtin_ctzll(late) : pairs; j < end; j++) {
        const __m512i w = take(j), by = _mm512_set1_epi32((int)bias[j * CodeLayout::SCALES]);
        add(j, made.even(w, by), made.odd(w, by));
      }
      if (late == 0) break;
      late &= late - 1;
      const bf16* const x = block.numbers(2 * j, v);
      add(j, both(_mm512_loadu_si512(x), _mm512_loadu_si512(x + 64)),
          both(_mm512_loadu_si512(x + 32), _mm512_loadu_si512(x + 96)));
    }
#pragma GCC unroll 16
    for (int r = 0; r < H; r++)
#pragma GCC unroll 2
      for (int i = 0; i < N; i++) {
        float* const o = out + r * ldo + 64 * v + (2 * HIGH + PART + i) * VL;
        store(o, load<vf>(o) * change[r] + acc[i][r]);
      }
  }
  void mix(Codes codes, int64_t pairs) {
    for (int v = 0; v < s->latent / 64; v++) {
      if constexpr (P == 1) {
        mix_part<false, 0, 1, FIRST>(codes, pairs, v);
        mix_part<false, 1, 1, AGAIN>(codes, pairs, v);
        mix_part<true, 0, 1, AGAIN>(codes, pairs, v);
        mix_part<true, 1, 1, AGAIN>(codes, pairs, v);
      } else {
        mix_part<false, 0, 2, ONCE>(codes, pairs, v);
        mix_part<true, 0, 2, ONCE>(codes, pairs, v);
      }
    }
  }
};

}  // namespace
#endif
