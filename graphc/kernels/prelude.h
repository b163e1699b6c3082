// What nearly every kernel includes, compiled once per compiler and flags into a precompiled header
// and put in front of every translation unit: parsing <immintrin.h> alone takes longer than
// compiling a small kernel.
#pragma once
#if defined(__x86_64__) || defined(__i386__)
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ == 12
// A quarter of <immintrin.h>, which no kernel calls, is not parsed: half floats, the shorter vectors
// of AVX-512 DQ and VBMI, and VBMI2. Other versions may need these headers for others.
#define __AVX512FP16INTRIN_H_INCLUDED
#define __AVX512FP16VLINTRIN_H_INCLUDED
#define _AVX512VLDQINTRIN_H_INCLUDED
#define _AVX512VBMIVLINTRIN_H_INCLUDED
#define __AVX512VBMI2INTRIN_H_INCLUDED
#define _AVX512VBMI2VLINTRIN_H_INCLUDED
#endif
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
