// Attention over latent rows in records, for queries of f32: see latent_attention.h.
#include "latent_attention.h"

GC_LATENT_RECORDS(f32, float, gc::Floats)
