// Attention over latent rows of f16: see latent_attention.h.
#include "latent_attention.h"

GC_LATENT(f16, gc::f16, gc::Floats)
