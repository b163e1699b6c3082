// What nearly every kernel includes, compiled once per compiler and flags into a precompiled header
// and put in front of every translation unit: parsing <immintrin.h> alone takes longer than
// compiling a small kernel.
#pragma once
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "abi.h"
#include "num.h"
