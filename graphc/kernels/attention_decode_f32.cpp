// Attention of few queries over many f32 keys.
#include "attention_decode_driver.h"

GC_DECODE(f32, float)
