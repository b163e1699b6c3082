// Few queries over pasts in records: see attention_cached_few.h.
#define GC_CACHED_RECORDS
#include "attention_cached_few.cpp"
