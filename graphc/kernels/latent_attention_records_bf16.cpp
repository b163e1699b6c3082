// Attention over latent rows in records, for queries of bf16: see latent_attention.h.
#include "latent_attention.h"

#if defined(__AVX512BF16__)
GC_LATENT_RECORDS(bf16, gc::bf16, gc::Pairs)
#else
GC_LATENT_RECORDS(bf16, gc::bf16, gc::Floats)
#endif
