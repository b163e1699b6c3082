// Attention of few queries over many bf16 keys.
#include "attention_decode_driver.h"

GC_DECODE(bf16, gc::bf16)
