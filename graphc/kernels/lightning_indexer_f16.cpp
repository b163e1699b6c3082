// The Lightning Indexer over f16: see lightning_indexer.h.
#include "lightning_indexer.h"

GC_INDEXER(f16, gc::f16, gc::Floats)
