// The Lightning Indexer over bf16: see lightning_indexer.h.
#include "lightning_indexer.h"

#if defined(__AVX512BF16__)
GC_INDEXER(bf16, gc::bf16, gc::Pairs)
#else
GC_INDEXER(bf16, gc::bf16, gc::Floats)
#endif
