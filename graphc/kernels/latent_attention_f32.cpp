// Attention over latent rows of f32: see latent_attention.h.
#pragma graphc vectors_by_hand
#include "latent_attention.h"

GC_LATENT(f32, float, gc::Floats)
