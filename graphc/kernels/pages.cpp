// Rows written to and read from pages (paging.h).
//
// append: ptr = {pages, table, start, parts...}; the range is (sequence, new row). A row is its parts
// side by side. read: ptr = {pages, table, out}; the range is (sequence, page of it).
#include "paging.h"
#include "strided.h"

namespace gc {
namespace {

struct Part {
  int64_t type;  // 0 that of the pages, 1 fp32, 2 bf16, 3 fp16
  int64_t width, b, t, step;
};

// A row of a page is `width` numbers that lie together, then as many a `plane` further on, and so on.
struct RowShape {
  gc_paging paging;
  int64_t width, plane, page, row;
};

struct AppendShape : RowShape {
  int64_t new_rows, parts;
  Part part[];
};

template <class T, class S>
void convert_run(T* dst, const S* src, int64_t step, int64_t n) {
  if (step == 1) {
    for (int64_t i = 0; i < n; ++i) dst[i] = (T)(float)src[i];
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = (T)(float)src[i * step];
  }
}

// Convert: the pages hold floats, and so do all parts.
template <class T, bool Convert>
void write_run(T* dst, const Part* p, const void* source, int64_t at, int64_t n) {
  if constexpr (Convert) {
    if (p->type == 1) return convert_run(dst, (const float*)source + at, p->step, n);
    if (p->type == 2) return convert_run(dst, (const bf16*)source + at, p->step, n);
    if (p->type == 3) return convert_run(dst, (const f16*)source + at, p->step, n);
  }
  copy_run(dst, 1, (const T*)source + at, p->step, n);
}

template <class T, bool Convert>
void append(const gc_args* args, int64_t begin, int64_t end) {
  const AppendShape* s = (const AppendShape*)args->imm;
  const int32_t *table = (const int32_t*)args->ptr[1], *start = (const int32_t*)args->ptr[2];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / s->new_rows, t = i % s->new_rows, at = start[b] + t;
    if (at < 0) continue;
    const int64_t page = page_of(&s->paging, table, b, at / s->paging.rows);
    if (page < 0) continue;
    T* dst = (T*)args->ptr[0] + page * s->page + at % s->paging.rows * s->row;
    int64_t plane = 0, place = 0;
    for (int64_t k = 0; k < s->parts; ++k) {
      const Part* p = &s->part[k];
      for (int64_t done = 0, n; done < p->width; done += n) {
        n = min64(p->width - done, s->width - place);
        write_run<T, Convert>(dst + plane * s->plane + place, p, args->ptr[3 + k],
                              b * p->b + t * p->t + done * p->step, n);
        place += n;
        if (place == s->width) place = 0, plane++;
      }
    }
  }
}

struct ReadShape : RowShape {
  int64_t offset, columns;
};

template <class T>
void read(const gc_args* args, int64_t begin, int64_t end) {
  const ReadShape* s = (const ReadShape*)args->imm;
  const int64_t rows = s->paging.rows, size = rows * s->columns;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t page =
        page_of(&s->paging, (const int32_t*)args->ptr[1], i / s->paging.blocks, i % s->paging.blocks);
    T* dst = (T*)args->ptr[2] + i * size;
    if (page < 0) {
      memset((void*)dst, 0, (size_t)size * sizeof(T));
      continue;
    }
    const T* src = (const T*)args->ptr[0] + page * s->page;
    if (s->row == s->columns && s->width == s->columns && s->offset % s->width == 0) {
      memcpy((void*)dst, src + s->offset / s->width * s->plane, (size_t)size * sizeof(T));
      continue;
    }
    for (int64_t at = s->offset, n; at < s->offset + s->columns; at += n, dst += n) {
      const int64_t plane = at / s->width, place = at % s->width;
      n = min64(s->width - place, s->offset + s->columns - at);
      for (int64_t r = 0; r < rows; ++r)
        memcpy((void*)(dst + r * s->columns), src + plane * s->plane + r * s->row + place,
               (size_t)n * sizeof(T));
    }
  }
}

}  // namespace
}  // namespace gc

#define GC_MOVE(TAG, T)                                                                        \
  GC_EXPORT void gc_append_pages_##TAG(const gc_args* args, int64_t begin, int64_t end) {      \
    gc::append<T, false>(args, begin, end);                                                    \
  }                                                                                            \
  GC_EXPORT void gc_read_pages_##TAG(const gc_args* args, int64_t begin, int64_t end) {        \
    gc::read<T>(args, begin, end);                                                             \
  }
#define GC_CONVERT(TAG, T)                                                                     \
  GC_EXPORT void gc_append_pages_##TAG(const gc_args* args, int64_t begin, int64_t end) {      \
    gc::append<T, true>(args, begin, end);                                                     \
  }
GC_FOR_BYTES(GC_MOVE)
GC_FOR_FLOATS(GC_CONVERT)
