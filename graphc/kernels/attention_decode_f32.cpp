// Attention of few queries over many f32 keys.
#pragma graphc vectors_by_hand
#include "attention_decode_driver.h"

GC_DECODE(f32, float)
