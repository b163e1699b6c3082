// The Lightning Indexer over f32: see lightning_indexer.h.
#include "lightning_indexer.h"

GC_INDEXER(f32, float, gc::Floats)
