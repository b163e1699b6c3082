// Attention over latent rows of f32: see latent_attention.h.
#include "latent_attention.h"

GC_LATENT(f32, float, gc::Floats)
