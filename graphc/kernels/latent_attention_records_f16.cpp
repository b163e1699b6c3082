// Attention over latent rows in records, for queries of f16: see latent_attention.h.
#include "latent_attention.h"

GC_LATENT_RECORDS(f16, gc::f16, gc::Floats)
