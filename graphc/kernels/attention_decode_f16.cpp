// Attention of few queries over many f16 keys.
#include "attention_decode_driver.h"

GC_DECODE(f16, gc::f16)
