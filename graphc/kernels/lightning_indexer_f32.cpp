// The Lightning Indexer over f32: see lightning_indexer.h.
#pragma graphc vectors_by_hand
#include "lightning_indexer.h"

GC_INDEXER(f32, float, gc::Floats)
