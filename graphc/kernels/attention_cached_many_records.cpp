// Many queries over pasts in records: see attention_cached_many.h.
#define GC_CACHED_RECORDS
#include "attention_cached_many.cpp"
