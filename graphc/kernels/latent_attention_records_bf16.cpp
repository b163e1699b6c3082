// Attention over latent rows in records, for queries of bf16: see latent_attention.h.
#include "latent_codes.h"

#if GC_RECORDS_AS_BF16
GC_EXPORT void attention_latent_records_bf16(const gc_args* args, int64_t begin, int64_t end) {
  const gc_latent_shape* s = (const gc_latent_shape*)args->imm;
  if (!CodeLayout().set(s->form, s->latent)) attend<bf16, Pairs, uint8_t>(args, begin, end);
  else if (s->heads <= VL / 2) attend_units<LatentCodes<2>>(args, begin, end);
  else attend_units<LatentCodes<1>>(args, begin, end);
}
GC_LATENT_RECORDS_MERGE(bf16, bf16)
#else
GC_LATENT_RECORDS(bf16, gc::bf16, gc::Floats)
#endif
