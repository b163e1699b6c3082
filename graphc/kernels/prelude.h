// What nearly every kernel includes, compiled once per compiler and flags into a precompiled header
// and put in front of every translation unit: parsing <immintrin.h> alone takes longer than
// compiling a small kernel.
#pragma once
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// The C++17 functions of libstdc++'s <cmath> that no kernel calls (Bessel, Legendre, ...) take half
// as long to parse as <immintrin.h>.
#include <cstddef>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <math.h>

#include "abi.h"
#include "num.h"
