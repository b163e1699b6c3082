// Attention of a few queries over many keys: k and v are read once, in place; see attention.h.
#include "attention_softmax.h"

namespace {
using namespace gc;

constexpr int64_t KEYS = 256;
GC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// s[j] = q . k[j] for eight keys at a time.
template <class T>
static void dot_keys(const float* q, const T* k, int64_t step, int64_t d, int64_t keys, float* s) {
  int64_t j = 0;
  for (; j + 8 <= keys; j += 8) {
    vf8 sum[8] = {};
    int64_t i = 0;
    for (; i + 8 <= d; i += 8) {
      const vf8 qv = load<vf8>(q + i);
#pragma GCC unroll 8
      for (int r = 0; r < 8; r++) sum[r] += qv * load8(k + (j + r) * step + i);
    }
    transpose8(sum);
    vf8 dots = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    for (; i < d; i++)
      for (int r = 0; r < 8; r++) dots[r] += q[i] * to_float(k[(j + r) * step + i]);
    store(s + j, dots);
  }
  for (; j < keys; j++) {
    float dot = 0.0f;
    for (int64_t i = 0; i < d; i++) dot += q[i] * to_float(k[j * step + i]);
    s[j] = dot;
  }
}

// out[dv] += p[keys] . v[keys][dv], 64 columns at a time in registers.
template <class T>
static void mix_values(const float* p, const T* v, int64_t step, int64_t dv, int64_t keys,
                       float* out) {
  int64_t c = 0;
  for (; c + 32 <= dv; c += 32) {
    vf8 sum[2][4] = {};
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
#pragma GCC unroll 2
      for (int u = 0; u < 2; u++) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) sum[u][r] += p[j + u] * load8(v + (j + u) * step + c + r * 8);
      }
    }
    if (j < keys) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) sum[0][r] += p[j] * load8(v + j * step + c + r * 8);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
      store(out + c + r * 8, load<vf8>(out + c + r * 8) + (sum[0][r] + sum[1][r]));
  }
  for (; c < dv; c++) {
    float sum = 0.0f;
    for (int64_t j = 0; j < keys; j++) sum += p[j] * to_float(v[j * step + c]);
    out[c] += sum;
  }
}

template <class T>
static void decode(const gc_args* args, gc_epilogue epilogue, float scale, int64_t begin,
                   int64_t end) {
  const gc_attention_shape* s = (const gc_attention_shape*)args->imm;
  float* const q = (float*)args->scratch;  // [d]
  float* const scores = q + s->d;          // [KEYS]
  float* const mask = scores + KEYS;       // [KEYS]
  float* const out = mask + KEYS;          // [dv]
  for (int64_t u = begin; u < end; u++) {
    const int64_t z = u / s->tq, t = u % s->tq;
    const T* source = (const T*)args->ptr[0] + gc_batch_offset(s->size, s->q_z, z) + t * s->q_t;
    const T* k = (const T*)args->ptr[1] + gc_batch_offset(s->size, s->k_z, z);
    const T* v = (const T*)args->ptr[2] + gc_batch_offset(s->size, s->v_z, z);
    const int64_t mask_offset = gc_batch_offset(s->size, s->mask_z, z) + t * s->mask_q;
    for (int64_t i = 0; i < s->d; i++) q[i] = scale * LOG2E * to_float(source[i * s->q_d]);
    for (int64_t i = 0; i < s->dv; i++) out[i] = 0.0f;
    float maximum = NEGATIVE_INFINITY, total = 0.0f;
    const int64_t keys = s->causal ? min64(s->tk, t + 1) : s->tk;
    for (int64_t k0 = 0; k0 < keys; k0 += KEYS) {
      const int64_t nk = min64(KEYS, keys - k0);
      dot_keys(q, k + k0 * s->k_t, s->k_t, s->d, nk, scores);
      if (s->mask_type) {
        load_mask(s, args->ptr[3], mask_offset + k0 * s->mask_k, 1, nk, mask, KEYS);
        for (int64_t j = 0; j < nk; j++) scores[j] += mask[j];
      }
      float now = maximum;
      for (int64_t j = 0; j < nk; j++) now = scores[j] > now ? scores[j] : now;
      const float base = now == NEGATIVE_INFINITY ? 0.0f : now;
      const float factor = exp2_negative1(maximum - base);
      maximum = now;
      for (int64_t j = nk; j % VL; j++) scores[j] = NEGATIVE_INFINITY;
      vf sum = {};
      for (int64_t j = 0; j < nk; j += VL) {
        const vf e = exp2_negative(load<vf>(scores + j) - base);
        store(scores + j, e);
        sum += e;
      }
      total *= factor;
      for (int i = 0; i < VL; i++) total += sum[i];
      if (k0 > 0 && factor != 1.0f)
        for (int64_t i = 0; i < s->dv; i++) out[i] *= factor;
      mix_values(scores, v + k0 * s->v_t, s->v_t, s->dv, nk, out);
    }
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    for (int64_t i = 0; i < s->dv; i++) out[i] *= factor;
    epilogue(args, out, s->dv, z, t, 1, 0, s->dv);
  }
}

}  // namespace

GC_ATTENTION(decode_f32) { decode<float>(args, epilogue, scale, begin, end); }
GC_ATTENTION(decode_bf16) { decode<bf16>(args, epilogue, scale, begin, end); }
GC_ATTENTION(decode_f16) { decode<f16>(args, epilogue, scale, begin, end); }
