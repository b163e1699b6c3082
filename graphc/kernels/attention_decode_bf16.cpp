// Attention of few queries over many bf16 keys.
#pragma graphc vectors_by_hand
#include "attention_decode_driver.h"

GC_DECODE(bf16, gc::bf16)
