// Rows written to pages as records and read from them (records.h, paging.h).
//
// append: ptr = {pages, table, start, parts...}; the range is (sequence, new row). A row is its parts
// side by side. read: ptr = {pages, table, out}; the range is (sequence, page of it).
#include "prelude.h"

#include "paging.h"
#include "records.h"

namespace {
using namespace gc;

// A row of a page is `planes` records, a `plane` of bytes apart.
struct RowShape {
  gc_paging paging;
  int64_t planes, plane, page, row;
  gc_record_format format;
};
// terms: 2: the second record is of what the first leaves of the row.
struct Part {
  int64_t type;  // 1 fp32, 2 bf16, 3 fp16
  int64_t width, b, t, step;
};
struct AppendShape : RowShape {
  int64_t terms, new_rows, parts;
  Part part[];
};
struct ReadShape : RowShape {
  int64_t type, offset, columns;
};

template <class S> void gather(const void* source, int64_t at, int64_t step, int64_t n, float* to) {
  const S* from = (const S*)source + at;
  if (step == 1) return convert(from, n, to);
  for (int64_t i = 0; i < n; i++) to[i] = (float)from[i * step];
}

// The record of a row of a page, in its place.
void put(const float* x, const RowShape* s, int64_t slot, uint8_t* page, uint8_t* record) {
  if (s->format.group == 1) return encode_record(x, &s->format, page + slot * s->row);
  encode_record(x, &s->format, record);
  put_in_group(record, s->format.width, page + (slot & -GROUPED) * s->row, slot % GROUPED);
}
template <class T>
void get(const uint8_t* page, const RowShape* s, int64_t slot, T* to, uint8_t* record) {
  if (s->format.group == 1) return decode_record(page + slot * s->row, &s->format, to);
  get_from_group(page + (slot & -GROUPED) * s->row, s->format.width, slot % GROUPED, record);
  decode_record(record, &s->format, to);
}

// scratch: two rows of floats, and a record
void append(const gc_args* args, int64_t begin, int64_t end) {
  const AppendShape* s = (const AppendShape*)args->imm;
  const int32_t *table = (const int32_t*)args->ptr[1], *start = (const int32_t*)args->ptr[2];
  float* const row = (float*)args->scratch;
  for (int64_t i = begin; i < end; i++) {
    const int64_t b = i / s->new_rows, t = i % s->new_rows, at = start[b] + t;
    if (at < 0) continue;
    const int64_t page = page_of(&s->paging, table, b, at / s->paging.rows);
    if (page < 0) continue;
    float* to = row;
    for (int64_t k = 0; k < s->parts; k++) {
      const Part* p = &s->part[k];
      const int64_t place = b * p->b + t * p->t;
      if (p->type == 1) gather<float>(args->ptr[3 + k], place, p->step, p->width, to);
      else if (p->type == 2) gather<bf16>(args->ptr[3 + k], place, p->step, p->width, to);
      else gather<f16>(args->ptr[3 + k], place, p->step, p->width, to);
      to += p->width;
    }
    uint8_t* const dst = (uint8_t*)args->ptr[0] + page * s->page;
    uint8_t* const record = (uint8_t*)(row + 2 * s->planes * s->format.width);
    const int64_t slot = at % s->paging.rows;
    if (s->terms == 2) {
      float* const kept = row + s->format.width;
      put(row, s, slot, dst, record);
      get(dst, s, slot, kept, record);
      for (int64_t k = 0; k < s->format.width; k++) row[k] -= kept[k];
      put(row, s, slot, dst + s->plane, record);
      continue;
    }
    for (int64_t k = 0; k < s->planes; k++)
      put(row + k * s->format.width, s, slot, dst + k * s->plane, record);
  }
}

// scratch: a row of floats, and a record
template <class T> void read(const gc_args* args, int64_t begin, int64_t end) {
  const ReadShape* s = (const ReadShape*)args->imm;
  const int64_t rows = s->paging.rows, width = s->format.width;
  const int64_t first = s->offset / width, last = (s->offset + s->columns + width - 1) / width;
  T* const row = (T*)args->scratch;
  uint8_t* const record = (uint8_t*)args->scratch + s->planes * width * 4;
  for (int64_t i = begin; i < end; i++) {
    const int64_t page =
        page_of(&s->paging, (const int32_t*)args->ptr[1], i / s->paging.blocks, i % s->paging.blocks);
    T* dst = (T*)args->ptr[2] + i * rows * s->columns;
    if (page < 0) {
      memset((void*)dst, 0, (size_t)(rows * s->columns) * sizeof(T));
      continue;
    }
    const uint8_t* src = (const uint8_t*)args->ptr[0] + page * s->page;
    const bool whole = s->offset == first * width && s->columns == (last - first) * width;
    for (int64_t r = 0; r < rows; r++, dst += s->columns) {
      T* const to = whole ? dst : row;
      for (int64_t k = first; k < last; k++)
        get(src + k * s->plane, s, r, to + (k - first) * width, record);
      if (!whole)
        memcpy((void*)dst, row + (s->offset - first * width), (size_t)s->columns * sizeof(T));
    }
  }
}

}  // namespace

GC_EXPORT void gc_append_records(const gc_args* args, int64_t begin, int64_t end) {
  append(args, begin, end);
}
GC_EXPORT void gc_read_records(const gc_args* args, int64_t begin, int64_t end) {
  const int64_t type = ((const ReadShape*)args->imm)->type;
  if (type == 1) read<float>(args, begin, end);
  else if (type == 2) read<gc::bf16>(args, begin, end);
  else read<gc::f16>(args, begin, end);
}
