// The hot loops of lightsecagg, with a C ABI for ctypes. See reference.py for every contract.
//
// Nothing here knows the protocol: these are loops over arrays. Callers have checked types, shapes
// and elements. Each loop is written once in plain C++ and compiled twice, for the baseline and for
// AVX2; three are also written with AVX2 intrinsics, where that pays: the tile of the matrix product,
// the butterflies of the transform and the quantisation. The choice is made at run time.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_AVX2 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,popcnt")))  // every machine with AVX2 counts ones
#else
#define HAVE_AVX2 0
#define AVX2
#endif

#if defined(_MSC_VER)
#define EXPORT extern "C" __declspec(dllexport)
#define INLINE static __forceinline
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
// Always inlined, so that the same body is compiled for the baseline and for AVX2.
#define INLINE static inline __attribute__((always_inline))
#endif

namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;
using std::size_t;

std::atomic<bool> avx2_allowed{true};  // tests switch it off to reach the plain loops

bool has_avx2() {
#if HAVE_AVX2
  static const bool supported = __builtin_cpu_supports("avx2");
  return supported && avx2_allowed;
#else
  return false;
#endif
}

// Defines name(...), which runs the loop name_loop(...) compiled for AVX2 where the machine has it.
#define COMPILED_TWICE(name, parameters, arguments)                  \
  AVX2 void name##_avx2 parameters { name##_loop arguments; }        \
  void name##_plain parameters { name##_loop arguments; }            \
  void name parameters {                                             \
    if (HAVE_AVX2 && has_avx2())                                     \
      name##_avx2 arguments;                                         \
    else                                                             \
      name##_plain arguments;                                        \
  }

// -- threads ------------------------------------------------------------------------------------

std::atomic<int> thread_limit{1};

// Calls work(begin, end) on disjoint ranges that cover [0, n), on up to thread_limit threads. Every
// range has at least `grain` elements (unless n is smaller) and begins at a multiple of it.
template <class Work>
void in_parallel(size_t n, size_t grain, const Work& work) {
  const size_t limit = static_cast<size_t>(thread_limit.load());
  const size_t parts = std::max<size_t>(1, std::min(limit, n / grain));
  const size_t step = n / grain / parts * grain;
  std::vector<std::thread> helpers;
  size_t begin = 0;
  for (size_t part = 1; part < parts; ++part, begin += step) {
    const size_t end = begin + step;
    try {
      helpers.emplace_back([&work, begin, end] { work(begin, end); });
    } catch (const std::system_error&) {
      work(begin, end);  // the system gives no more threads
    }
  }
  work(begin, n);
  for (std::thread& helper : helpers) helper.join();
}

// A range shorter than this is not worth a thread.
constexpr size_t GRAIN = 1 << 16;

// While one lives, this thread rounds to nearest and keeps subnormal numbers, whatever its program
// has asked the processor for.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&before_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

// -- one element --------------------------------------------------------------------------------

// In add, subtract and the loops that quantise and back q = 0 stands for 2^32: words wrap around by
// themselves, and a correction by q is none.

INLINE u32 add_one(u32 a, u32 b, u32 q) {
  const u32 c = q - b;  // a + b may not fit 32 bits, a - (q - b) does
  return a - c + (a < c ? q : 0);
}

INLINE u32 subtract_one(u32 a, u32 b, u32 q) { return a - b + (a < b ? q : 0); }

// x mod q with the precomputed floor((2^64 - 1) / q).
struct Barrett {
  u64 q, factor;
  explicit Barrett(u32 modulus) : q(modulus), factor(~u64{0} / modulus) {}
  u32 operator()(u64 x) const {
#if defined(__SIZEOF_INT128__)
    __extension__ using u128 = unsigned __int128;
    // The quotient is at most 2 too small: factor > 2^64 / q - 2 and the product is cut.
    u64 r = x - static_cast<u64>(static_cast<u128>(x) * factor >> 64) * q;
    r -= r >= q ? q : 0;
    r -= r >= q ? q : 0;
    return static_cast<u32>(r);
#else
    return static_cast<u32>(x % q);
#endif
  }
};

// A factor w < q with floor(w * 2^32 / q) (Shoup): x * w mod q without a division.
struct Factor {
  u32 w, quotient;
  Factor(u32 value, u32 q) : w(value), quotient(static_cast<u32>((u64{value} << 32) / q)) {}
};

INLINE u32 multiply_one(u32 x, Factor f, u32 q) {
  const u64 h = (u64{x} * f.quotient) >> 32;
  const u64 r = u64{x} * f.w - h * q;  // in [0, 2q), for every 32-bit x
  return static_cast<u32>(r - (r >= q ? q : 0));
}

// -- vectors ------------------------------------------------------------------------------------

INLINE void add_loop(const u32* a, const u32* b, u32* out, size_t n, u32 q) {
  for (size_t i = 0; i < n; ++i) out[i] = add_one(a[i], b[i], q);
}
COMPILED_TWICE(add, (const u32* a, const u32* b, u32* out, size_t n, u32 q), (a, b, out, n, q))

INLINE void subtract_loop(const u32* a, const u32* b, u32* out, size_t n, u32 q) {
  for (size_t i = 0; i < n; ++i) out[i] = subtract_one(a[i], b[i], q);
}
COMPILED_TWICE(subtract, (const u32* a, const u32* b, u32* out, size_t n, u32 q), (a, b, out, n, q))

// Totals of this many elements stay in the first-level cache while all vectors pass by.
constexpr size_t SUM_TILE = 2048;

INLINE void accumulate_loop(u64* __restrict totals, const u32* const* vectors, size_t count,
                            size_t begin, size_t end) {
  for (size_t start = begin; start < end; start += SUM_TILE) {
    const size_t stop = std::min(start + SUM_TILE, end);
    size_t v = 0;
    for (; v + 4 <= count; v += 4) {  // four streams at once keep the memory busy
      const u32 *a = vectors[v], *b = vectors[v + 1], *c = vectors[v + 2], *d = vectors[v + 3];
      for (size_t i = start; i < stop; ++i)
        totals[i] += (u64{a[i]} + b[i]) + (u64{c[i]} + d[i]);
    }
    for (; v < count; ++v) {
      const u32* a = vectors[v];
      for (size_t i = start; i < stop; ++i) totals[i] += a[i];
    }
  }
}
COMPILED_TWICE(accumulate,
               (u64 * totals, const u32* const* vectors, size_t count, size_t begin, size_t end),
               (totals, vectors, count, begin, end))

INLINE void accumulate_words_loop(u32* __restrict totals, const u32* const* vectors, size_t count,
                                  size_t begin, size_t end) {
  for (size_t start = begin; start < end; start += SUM_TILE) {
    const size_t stop = std::min(start + SUM_TILE, end);
    size_t v = 0;
    for (; v + 4 <= count; v += 4) {
      const u32 *a = vectors[v], *b = vectors[v + 1], *c = vectors[v + 2], *d = vectors[v + 3];
      for (size_t i = start; i < stop; ++i) totals[i] += (a[i] + b[i]) + (c[i] + d[i]);
    }
    for (; v < count; ++v) {
      const u32* a = vectors[v];
      for (size_t i = start; i < stop; ++i) totals[i] += a[i];
    }
  }
}
COMPILED_TWICE(accumulate_words,
               (u32 * totals, const u32* const* vectors, size_t count, size_t begin, size_t end),
               (totals, vectors, count, begin, end))

INLINE void weighted_accumulate_loop(u64* __restrict totals, const u32* const* vectors,
                                     const u32* weights, size_t count, size_t begin, size_t end) {
  for (size_t start = begin; start < end; start += SUM_TILE) {
    const size_t stop = std::min(start + SUM_TILE, end);
    size_t v = 0;
    for (; v + 2 <= count; v += 2) {
      const u32 *a = vectors[v], *b = vectors[v + 1];
      const u64 w = weights[v], x = weights[v + 1];
      for (size_t i = start; i < stop; ++i) totals[i] += w * a[i] + x * b[i];
    }
    for (; v < count; ++v) {
      const u32* a = vectors[v];
      const u64 w = weights[v];
      for (size_t i = start; i < stop; ++i) totals[i] += w * a[i];
    }
  }
}
COMPILED_TWICE(weighted_accumulate,
               (u64 * totals, const u32* const* vectors, const u32* weights, size_t count,
                size_t begin, size_t end),
               (totals, vectors, weights, count, begin, end))

// Index of the first element for which `bad` holds, or n. Whole blocks are tested without a
// branch per element, so that the test is vectorised.
template <class T, class Bad>
INLINE size_t first_where(const T* x, size_t n, const Bad& bad) {
  constexpr size_t block = 4096;
  for (size_t start = 0; start < n; start += block) {
    const size_t stop = std::min(start + block, n);
    u32 found = 0;
    for (size_t i = start; i < stop; ++i) found |= static_cast<u32>(bad(x[i]));
    if (found)
      for (size_t i = start; i < stop; ++i)
        if (bad(x[i])) return i;
  }
  return n;
}

INLINE void find_out_of_range_loop(const u32* x, size_t n, u32 q, size_t* position) {
  *position = first_where(x, n, [q](u32 value) { return value >= q; });
}
COMPILED_TWICE(find_out_of_range, (const u32* x, size_t n, u32 q, size_t* position),
               (x, n, q, position))

template <class T>
INLINE void find_beyond_body(const T* x, size_t n, double bound, size_t* position) {
  // Written so that NaN is beyond every bound.
  *position = first_where(x, n, [bound](T value) {
    const double y = value;
    return !(y <= bound) | !(y >= -bound);
  });
}
INLINE void find_beyond32_loop(const float* x, size_t n, double bound, size_t* position) {
  find_beyond_body(x, n, bound, position);
}
COMPILED_TWICE(find_beyond32, (const float* x, size_t n, double bound, size_t* position),
               (x, n, bound, position))
INLINE void find_beyond64_loop(const double* x, size_t n, double bound, size_t* position) {
  find_beyond_body(x, n, bound, position);
}
COMPILED_TWICE(find_beyond64, (const double* x, size_t n, double bound, size_t* position),
               (x, n, bound, position))

// Stores the first `capacity` positions but counts all.
INLINE void cut_and_find_loop(u32* words, size_t n, u32 mask, u32 q, std::int64_t* positions,
                              size_t capacity, size_t* count) {
  constexpr size_t block = 128;  // rejects are rare: most blocks are only cut and compared
  *count = 0;
  for (size_t start = 0; start < n; start += block) {
    const size_t stop = std::min(start + block, n);
    u32 found = 0;
    for (size_t i = start; i < stop; ++i) {
      words[i] &= mask;
      found |= words[i] >= q;
    }
    if (!found) continue;
    for (size_t i = start; i < stop; ++i) {
      if (words[i] < q) continue;
      if (*count < capacity) positions[*count] = static_cast<std::int64_t>(i);
      ++*count;
    }
  }
}
COMPILED_TWICE(cut_and_find,
               (u32 * words, size_t n, u32 mask, u32 q, std::int64_t* positions, size_t capacity,
                size_t* count),
               (words, n, mask, q, positions, capacity, count))

// -- noise --------------------------------------------------------------------------------------

INLINE u32 ones_of(u64 x) {
#if defined(__GNUC__) || defined(__clang__)
  return static_cast<u32>(__builtin_popcountll(x));
#else
  x -= (x >> 1) & 0x5555555555555555u;
  x = (x & 0x3333333333333333u) + ((x >> 2) & 0x3333333333333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
  return static_cast<u32>((x * 0x0101010101010101u) >> 56);
#endif
}

// Counts first, then multiplies and adds: the second loop is vectorised.
INLINE void add_popcount_noise_loop(const u32* words, u32* z, size_t n, u32 step, u32 q) {
  const Factor factor(step, q);
  const u32 centre = multiply_one(128, factor, q);
  constexpr size_t tile = 256;
  u32 ones[tile];
  for (size_t start = 0; start < n; start += tile) {
    const size_t count = std::min(tile, n - start);
    for (size_t i = 0; i < count; ++i) {
      u64 bits[4];
      std::memcpy(bits, words + 8 * (start + i), sizeof(bits));
      ones[i] = ones_of(bits[0]) + ones_of(bits[1]) + ones_of(bits[2]) + ones_of(bits[3]);
    }
    for (size_t i = 0; i < count; ++i) {
      const u32 noise = subtract_one(multiply_one(ones[i], factor, q), centre, q);
      z[start + i] = add_one(z[start + i], noise, q);
    }
  }
}
COMPILED_TWICE(add_popcount_noise, (const u32* words, u32* z, size_t n, u32 step, u32 q),
               (words, z, n, step, q))

// -- quantisation -------------------------------------------------------------------------------

template <class T>
void quantise_mask_plain(const T* x, double scale, double limit, const u32* uniforms,
                         const u32* mask, u32* out, size_t n, u32 q) {
  for (size_t i = 0; i < n; ++i) {
    double y = static_cast<double>(x[i]) * scale;
    y = y < limit ? y : limit;
    y = y > -limit ? y : -limit;
    // |y| < 2^31: truncating and correcting is a floor that needs no library call.
    double rounded = static_cast<double>(static_cast<i32>(y));
    rounded -= y < rounded ? 1.0 : 0.0;
    rounded += (y - rounded) * 4294967296.0 > static_cast<double>(uniforms[i]) ? 1.0 : 0.0;
    const i32 integer = static_cast<i32>(rounded);
    const u32 element = static_cast<u32>(integer) + (integer < 0 ? q : 0);
    out[i] = add_one(element, mask[i], q);
  }
}

#if HAVE_AVX2

AVX2 INLINE __m256d load_four(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
AVX2 INLINE __m256d load_four(const double* x) { return _mm256_loadu_pd(x); }

// Four rounded integers in the lower halves of the lanes. Adding a power of two shifts an integer to
// the low bits of a double and back again, in one operation where a conversion takes several.
AVX2 INLINE __m256i quantised(__m256d x, const u32* uniforms, __m256d scale, __m256d limit) {
  const __m256d least = _mm256_xor_pd(limit, _mm256_set1_pd(-0.0));
  const __m256d y = _mm256_max_pd(_mm256_min_pd(_mm256_mul_pd(x, scale), limit), least);
  const __m256d down = _mm256_floor_pd(y);
  const __m256d fraction = _mm256_mul_pd(_mm256_sub_pd(y, down), _mm256_set1_pd(4294967296.0));
  const __m256d two_52 = _mm256_set1_pd(4503599627370496.0);
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(uniforms));
  const __m256d shifted = _mm256_or_pd(_mm256_castsi256_pd(_mm256_cvtepu32_epi64(words)), two_52);
  const __m256d above = _mm256_cmp_pd(fraction, _mm256_sub_pd(shifted, two_52), _CMP_GT_OQ);
  const __m256d rounded = _mm256_add_pd(down, _mm256_and_pd(above, _mm256_set1_pd(1.0)));
  return _mm256_castpd_si256(_mm256_add_pd(rounded, _mm256_set1_pd(6755399441055744.0)));
}

template <class T>
AVX2 void quantise_mask_avx2(const T* x, double scale, double limit, const u32* uniforms,
                             const u32* mask, u32* out, size_t n, u32 q) {
  const __m256d s = _mm256_set1_pd(scale), l = _mm256_set1_pd(limit);
  const __m256i modulus = _mm256_set1_epi32(static_cast<i32>(q));
  // A result that no cache can hold is written past the caches, which takes aligned addresses.
  const bool stream = n >= 4 * GRAIN;
  size_t i = stream ? (32 - reinterpret_cast<std::uintptr_t>(out) % 32) % 32 / sizeof(u32) : 0;
  quantise_mask_plain(x, scale, limit, uniforms, mask, out, i, q);
  for (; i + 8 <= n; i += 8) {
    const __m256i first = quantised(load_four(x + i), uniforms + i, s, l);
    const __m256i second = quantised(load_four(x + i + 4), uniforms + i + 4, s, l);
    const __m256 lower =
        _mm256_shuffle_ps(_mm256_castsi256_ps(first), _mm256_castsi256_ps(second), 0x88);
    const __m256i integer = _mm256_permute4x64_epi64(_mm256_castps_si256(lower), 0xD8);
    const __m256i negative = _mm256_srai_epi32(integer, 31);
    const __m256i a = _mm256_add_epi32(integer, _mm256_and_si256(negative, modulus));
    // add_one on eight lanes.
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask + i));
    const __m256i c = _mm256_sub_epi32(modulus, b);
    const __m256i fits = _mm256_cmpeq_epi32(_mm256_max_epu32(a, c), a);
    const __m256i sum = _mm256_add_epi32(_mm256_sub_epi32(a, c), _mm256_andnot_si256(fits, modulus));
    stream ? _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), sum)
           : _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), sum);
  }
  if (stream) _mm_sfence();
  quantise_mask_plain(x + i, scale, limit, uniforms + i, mask + i, out + i, n - i, q);
}

#endif

template <class T>
void quantise_mask(const T* x, double scale, double limit, const u32* uniforms, const u32* mask,
                   u32* out, size_t n, u32 q) {
  in_parallel(n, GRAIN, [=](size_t i, size_t end) {
#if HAVE_AVX2
    if (has_avx2())
      return quantise_mask_avx2(x + i, scale, limit, uniforms + i, mask + i, out + i, end - i, q);
#endif
    quantise_mask_plain(x + i, scale, limit, uniforms + i, mask + i, out + i, end - i, q);
  });
}

template <class T>
INLINE void unmask_dequantise_body(const u32* masked, const u32* mask, double scale, u32 q, T* out,
                                   size_t n) {
  const u32 half = (q - 1) / 2;
  for (size_t i = 0; i < n; ++i) {
    const u32 element = subtract_one(masked[i], mask[i], q);
    const i32 integer = static_cast<i32>(element - (element >= half ? q : 0));
    out[i] = static_cast<T>(static_cast<double>(integer) * scale);
  }
}
INLINE void unmask_dequantise32_loop(const u32* masked, const u32* mask, double scale, u32 q,
                                     float* out, size_t n) {
  unmask_dequantise_body(masked, mask, scale, q, out, n);
}
COMPILED_TWICE(unmask_dequantise32,
               (const u32* masked, const u32* mask, double scale, u32 q, float* out, size_t n),
               (masked, mask, scale, q, out, n))
INLINE void unmask_dequantise64_loop(const u32* masked, const u32* mask, double scale, u32 q,
                                     double* out, size_t n) {
  unmask_dequantise_body(masked, mask, scale, q, out, n);
}
COMPILED_TWICE(unmask_dequantise64,
               (const u32* masked, const u32* mask, double scale, u32 q, double* out, size_t n),
               (masked, mask, scale, q, out, n))

#include "packed.h"

// -- matrix product, plain ----------------------------------------------------------------------

constexpr size_t PLAIN_TILE = 256;

// out[:, begin:end] = a @ b[:, begin:end] for a of shape (m, k) and b of shape (k, n). Products are
// summed in two words each, so that nothing is reduced before the end.
INLINE void matmul_plain_loop(const u32* a, const u32* b, u32* out, size_t m, size_t k, size_t n,
                              u32 q, size_t begin, size_t end) {
  const Barrett reduce(q);
  u64 high[PLAIN_TILE], low[PLAIN_TILE];
  for (size_t column = begin; column < end; column += PLAIN_TILE) {
    const size_t width = std::min(PLAIN_TILE, end - column);
    for (size_t row = 0; row < m; ++row) {
      std::fill_n(high, width, 0);
      std::fill_n(low, width, 0);
      for (size_t t = 0; t < k; ++t) {
        const u64 factor = a[row * k + t];
        const u32* source = b + t * n + column;
        for (size_t c = 0; c < width; ++c) {
          const u64 product = factor * source[c];
          low[c] += static_cast<u32>(product);
          high[c] += product >> 32;
        }
      }
      for (size_t c = 0; c < width; ++c)
        out[row * n + column + c] = reduce(reduce(u64{reduce(high[c])} << 32) + low[c]);
    }
  }
}
COMPILED_TWICE(matmul_plain,
               (const u32* a, const u32* b, u32* out, size_t m, size_t k, size_t n, u32 q,
                size_t begin, size_t end),
               (a, b, out, m, k, n, q, begin, end))

// -- matrix product, narrow ---------------------------------------------------------------------

// A few columns would leave most of a tile empty, and long rows would be packed for little. Here
// the columns are laid out one after the other, a chunk at a time, and multiplied with every row.

constexpr size_t NARROW = 4;    // columns of the right operand, at most
constexpr size_t CHUNK = 2048;  // of a column: all chunks together stay in the first cache

// totals[0] and totals[1] grow by the lower and the upper words of the products.
INLINE void dot_loop(const u32* a, const u32* b, size_t count, u64* totals) {
  u64 low = 0, high = 0;
  for (size_t t = 0; t < count; ++t) {
    const u64 product = u64{a[t]} * b[t];
    low += static_cast<u32>(product);
    high += product >> 32;
  }
  totals[0] += low;
  totals[1] += high;
}
COMPILED_TWICE(dot, (const u32* a, const u32* b, size_t count, u64* totals), (a, b, count, totals))

void matmul_narrow(const u32* a, const u32* b, u32* out, size_t k, size_t n, u32 q, size_t begin,
                   size_t end) {
  u32 columns[NARROW][CHUNK];
  std::vector<u64> totals(2 * (end - begin) * n, 0);
  for (size_t from = 0; from < k; from += CHUNK) {
    const size_t count = std::min(CHUNK, k - from);
    for (size_t t = 0; t < count; ++t)
      for (size_t c = 0; c < n; ++c) columns[c][t] = b[(from + t) * n + c];
    for (size_t row = begin; row < end; ++row)
      for (size_t c = 0; c < n; ++c)
        dot(a + row * k + from, columns[c], count, &totals[2 * ((row - begin) * n + c)]);
  }
  const Barrett reduce(q);
  for (size_t i = 0; i < (end - begin) * n; ++i)
    out[begin * n + i] = reduce(reduce(u64{reduce(totals[2 * i + 1])} << 32) + totals[2 * i]);
}

// -- matrix product, AVX2 -----------------------------------------------------------------------

#if HAVE_AVX2

// Operands are centred to +-q/2, so that a signed 64-bit word t holds the sum of a group of 2
// products for every q < 2^32, and of 8 for q < 2^31. Over the groups two words are kept:
//     sum   += t          which wraps, and
//     upper += t >> 40    which does not, in the upper halves of the lanes (a 32-bit shift and add).
// At the end total = upper * 2^40 + (sum - upper * 2^40 mod 2^64) is exact, because the last term
// is the sum of t mod 2^40 and fits. Two Montgomery steps divide it by 2^64 mod q, for which the
// left operand was multiplied by 2^64 mod q beforehand.

constexpr size_t TILE = 32;    // columns of the right operand that are packed together
constexpr size_t DEPTH = 256;  // products per total, at most
constexpr i32 UPPER_BIAS = 1 << 30;  // keeps `upper` positive: |upper| <= 128 * 2^23

struct Product {
  u32 q, inverse;  // q and q^-1 mod 2^32
  u64 offset;      // a multiple of q that makes the half-reduced total positive, less the bias

  explicit Product(u32 modulus) : q(modulus), inverse(modulus) {
    for (int step = 0; step < 4; ++step) inverse *= 2 - q * inverse;  // Newton: 3, 6, 12, 24, 48 bits
    const u64 half = (q - 1) / 2;
    const u64 bound = (half * half >> 32) * DEPTH + DEPTH + q;
    offset = (bound / q + 1) * q - (u64{UPPER_BIAS} << 8);
  }
};

INLINE void prefetch(const u32* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

INLINE i32 centred(u32 x, u32 q) { return static_cast<i32>(x - (x > q / 2 ? q : 0)); }

AVX2 INLINE __m256i divided_by_2_64(__m256i sum, __m256i upper, __m256i q, __m256i inverse,
                                    __m256i offset) {
  const __m256i head = _mm256_and_si256(upper, _mm256_set1_epi64x(~i64{0xFFFFFFFF}));
  const __m256i rest = _mm256_sub_epi64(sum, _mm256_slli_epi64(head, 8));
  __m256i v = _mm256_add_epi64(_mm256_srli_epi64(head, 24), _mm256_srli_epi64(rest, 32));
  __m256i m = _mm256_mul_epu32(_mm256_mul_epu32(rest, inverse), q);
  v = _mm256_add_epi64(_mm256_sub_epi64(v, _mm256_srli_epi64(m, 32)), offset);
  m = _mm256_mul_epu32(_mm256_mul_epu32(v, inverse), q);
  return _mm256_sub_epi64(_mm256_srli_epi64(v, 32), _mm256_srli_epi64(m, 32));  // in (-q, q)
}

// result[r][0..8) = row r of the panel times 8 columns of the packed tile.
template <int R, int GROUP>
AVX2 INLINE void panel_times_columns(const i32* panel, const i32* tile, size_t depth,
                                     const Product& p, u32* const* result) {
  __m256i sum[R][2], upper[R][2];
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < 2; ++h) {
      sum[r][h] = _mm256_setzero_si256();
      upper[r][h] = _mm256_set1_epi32(UPPER_BIAS);
    }
  for (size_t k = 0; k < depth; k += GROUP) {
    __m256i t[R][2];
#pragma GCC unroll 8
    for (int g = 0; g < GROUP; ++g) {
      // A product reads the even 32-bit lanes.
      const __m256i even = _mm256_load_si256(reinterpret_cast<const __m256i*>(tile));
      const __m256i odd = _mm256_shuffle_epi32(even, 0xF5);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256i a = _mm256_set1_epi32(panel[r]);
        const __m256i x = _mm256_mul_epi32(a, even), y = _mm256_mul_epi32(a, odd);
        t[r][0] = g ? _mm256_add_epi64(t[r][0], x) : x;
        t[r][1] = g ? _mm256_add_epi64(t[r][1], y) : y;
        // Keeps gcc from computing all products first and spilling them.
        asm("" : "+x"(t[r][0]), "+x"(t[r][1]));
      }
      tile += TILE;
      panel += R;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h) {
        sum[r][h] = _mm256_add_epi64(sum[r][h], t[r][h]);
        upper[r][h] = _mm256_add_epi32(upper[r][h], _mm256_srai_epi32(t[r][h], 8));
      }
  }
  const __m256i q = _mm256_set1_epi32(static_cast<i32>(p.q));
  const __m256i inverse = _mm256_set1_epi32(static_cast<i32>(p.inverse));
  const __m256i offset = _mm256_set1_epi64x(static_cast<i64>(p.offset));
  for (int r = 0; r < R; ++r) {
    const __m256i even = divided_by_2_64(sum[r][0], upper[r][0], q, inverse, offset);
    const __m256i odd = divided_by_2_64(sum[r][1], upper[r][1], q, inverse, offset);
    const __m256i low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    const __m256i negative = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(result[r]),
                        _mm256_add_epi32(low, _mm256_and_si256(negative, q)));
  }
}

// Rows of a in panels of R, centred and times 2^64; depth is padded to whole groups with zeros.
template <int R, int GROUP>
std::vector<i32> packed_panels(const u32* a, size_t m, size_t k, size_t from, size_t count, u32 q) {
  const u64 factor = (~u64{0} % q + 1) % q;
  const size_t depth = (count + GROUP - 1) / GROUP * GROUP, panels = (m + R - 1) / R;
  std::vector<i32> packed(panels * depth * R, 0);
  const Factor scale(static_cast<u32>(factor), q);
  for (size_t row = 0; row < m; ++row)
    for (size_t t = 0; t < count; ++t)
      packed[(row / R * depth + t) * R + row % R] =
          centred(multiply_one(a[row * k + from + t], scale, q), q);
  return packed;
}

template <int GROUP>
AVX2 INLINE void pack_tile(const u32* b, size_t n, size_t count, size_t width, u32 q, i32* tile) {
  for (size_t t = 0; t < count; ++t, b += n, tile += TILE) {
    if (width == TILE) {
      prefetch(b + TILE);  // the next tile: short pieces of far rows are not foreseen by hardware
      prefetch(b + TILE + 16);
      for (size_t c = 0; c < TILE; ++c) tile[c] = centred(b[c], q);
    } else {
      for (size_t c = 0; c < TILE; ++c) tile[c] = c < width ? centred(b[c], q) : 0;
    }
  }
  const size_t padding = (GROUP - count % GROUP) % GROUP;
  std::memset(tile, 0, padding * TILE * sizeof(i32));
}

template <int R, int GROUP>
AVX2 void matmul_columns(const i32* panels, const u32* b, u32* out, size_t m, size_t count,
                         size_t n, const Product& p, bool first, size_t begin, size_t end) {
  const size_t depth = (count + GROUP - 1) / GROUP * GROUP;
  alignas(64) i32 tile[DEPTH * TILE];
  alignas(32) u32 scratch[R][8];
  for (size_t column = begin; column < end; column += TILE) {
    const size_t width = std::min(TILE, end - column);
    pack_tile<GROUP>(b + column, n, count, width, p.q, tile);
    for (size_t row = 0; row < m; row += R) {
      for (size_t c = 0; c < width; c += 8) {
        const bool direct = first && c + 8 <= width && row + R <= m;
        u32* result[R];
        for (int r = 0; r < R; ++r)
          result[r] = direct ? out + (row + r) * n + column + c : scratch[r];
        panel_times_columns<R, GROUP>(panels + row * depth, tile + c, depth, p, result);
        if (direct) continue;
        for (size_t r = 0; r < std::min<size_t>(R, m - row); ++r)
          for (size_t i = 0; i < std::min<size_t>(8, width - c); ++i) {
            u32& target = out[(row + r) * n + column + c + i];
            target = first ? scratch[r][i] : add_one(target, scratch[r][i], p.q);
          }
      }
    }
  }
}

template <int R, int GROUP>
void matmul_tiled(const u32* a, const u32* b, u32* out, size_t m, size_t k, size_t n, u32 q) {
  const Product p(q);
  for (size_t from = 0; from < k; from += DEPTH) {
    const size_t count = std::min(DEPTH, k - from);
    const std::vector<i32> panels = packed_panels<R, GROUP>(a, m, k, from, count, q);
    in_parallel(n, 4 * TILE, [&](size_t begin, size_t end) {
      matmul_columns<R, GROUP>(panels.data(), b + from * n, out, m, count, n, p, from == 0, begin,
                               end);
    });
  }
}

#endif

void matmul(const u32* a, const u32* b, u32* out, size_t m, size_t k, size_t n, u32 q) {
  if (k == 0) {
    std::fill_n(out, m * n, 0);
    return;
  }
  if (n <= NARROW) {
    in_parallel(m, 8, [&](size_t begin, size_t end) {
      matmul_narrow(a, b, out, k, n, q, begin, end);
    });
    return;
  }
#if HAVE_AVX2
  if (has_avx2()) {
    if (q < u32{1} << 31)
      matmul_tiled<4, 8>(a, b, out, m, k, n, q);
    else
      matmul_tiled<2, 2>(a, b, out, m, k, n, q);
    return;
  }
#endif
  in_parallel(n, PLAIN_TILE, [&](size_t begin, size_t end) {
    matmul_plain(a, b, out, m, k, n, q, begin, end);
  });
}

// -- number-theoretic transform -----------------------------------------------------------------

constexpr size_t WIDTH = 64;  // columns that go down the tree together

// What every tile of columns needs to know about a transform between `size` coefficients and leaves.
struct Tree {
  size_t size;
  u32 q;
  std::vector<Factor> factors;      // per node
  std::vector<std::int64_t> row;    // per leaf: its row in the array, or -1
  std::vector<Factor> multipliers;  // per leaf
  std::vector<size_t> before;       // per leaf: how many leaves before it have a row

  Tree(const u32* roots, size_t count, const std::int64_t* positions, const u32* scales,
       size_t rows, u32 modulus)
      : size(count), q(modulus), row(count, -1), multipliers(count, Factor(0, modulus)) {
    for (size_t node = 0; node < size / 2; ++node) factors.emplace_back(roots[2 * node], q);
    for (size_t r = 0; r < rows; ++r) {
      const size_t leaf = static_cast<size_t>(positions[r]);
      row[leaf] = static_cast<std::int64_t>(r);
      multipliers[leaf] = Factor(scales[r], q);
    }
    before.push_back(0);
    for (size_t leaf = 0; leaf < size; ++leaf) before.push_back(before[leaf] + (row[leaf] >= 0));
  }

  // Whether none of the m leaves of this node has a row.
  bool is_idle(size_t node, size_t m) const { return before[node * m] == before[(node + 1) * m]; }
};

struct Forward {
  const Tree& tree;
  size_t rows;                // coefficients that are not zero
  const Factor* coefficient;  // per row: multiply by this first; may be null
  bool scaled;                // whether leaves are multiplied
};

struct Inverse {
  const Tree& tree;
  size_t coefficients;  // how many are wanted
};

INLINE void forward_plain_loop(const Forward& f, const u32* in, u32* out, size_t stride,
                               u32* buffer) {
  const Tree& tree = f.tree;
  const u32 q = tree.q;
  std::memset(buffer, 0, tree.size * WIDTH * sizeof(u32));
  for (size_t row = 0; row < f.rows; ++row)
    for (size_t c = 0; c < WIDTH; ++c) {
      const u32 x = in[row * stride + c];
      buffer[row * WIDTH + c] = f.coefficient ? multiply_one(x, f.coefficient[row], q) : x;
    }
  for (size_t half = tree.size / 2; half; half /= 2)
    for (size_t node = 0; node * 2 * half < tree.size; ++node) {
      if (tree.is_idle(node, 2 * half)) continue;
      const Factor factor = tree.factors[node];
      u32* low = buffer + node * 2 * half * WIDTH;
      u32* high = low + half * WIDTH;
      for (size_t i = 0; i < half * WIDTH; ++i) {
        const u32 x = multiply_one(high[i], factor, q), a = low[i];
        low[i] = add_one(a, x, q);
        high[i] = subtract_one(a, x, q);
      }
    }
  for (size_t leaf = 0; leaf < tree.size; ++leaf) {
    if (tree.row[leaf] < 0) continue;
    u32* target = out + static_cast<size_t>(tree.row[leaf]) * stride;
    const Factor factor = tree.multipliers[leaf];
    for (size_t c = 0; c < WIDTH; ++c) target[c] = multiply_one(buffer[leaf * WIDTH + c], factor, q);
  }
}
COMPILED_TWICE(forward_plain,
               (const Forward& f, const u32* in, u32* out, size_t stride, u32* buffer),
               (f, in, out, stride, buffer))

INLINE void inverse_plain_loop(const Inverse& f, const u32* in, u32* out, size_t stride,
                               u32* buffer) {
  const Tree& tree = f.tree;
  const u32 q = tree.q;
  std::memset(buffer, 0, tree.size * WIDTH * sizeof(u32));
  for (size_t leaf = 0; leaf < tree.size; ++leaf) {
    if (tree.row[leaf] < 0) continue;
    const u32* source = in + static_cast<size_t>(tree.row[leaf]) * stride;
    const Factor factor = tree.multipliers[leaf];
    for (size_t c = 0; c < WIDTH; ++c) buffer[leaf * WIDTH + c] = multiply_one(source[c], factor, q);
  }
  for (size_t half = 1; half < tree.size; half *= 2)
    for (size_t node = 0; node * 2 * half < tree.size; ++node) {
      if (tree.is_idle(node, 2 * half)) continue;
      const Factor factor = tree.factors[node];
      u32* low = buffer + node * 2 * half * WIDTH;
      u32* high = low + half * WIDTH;
      for (size_t i = 0; i < half * WIDTH; ++i) {
        const u32 a = low[i], b = high[i];
        low[i] = add_one(a, b, q);
        high[i] = multiply_one(subtract_one(a, b, q), factor, q);
      }
    }
  for (size_t row = 0; row < f.coefficients; ++row)
    std::memcpy(out + row * stride, buffer + row * WIDTH, WIDTH * sizeof(u32));
}
COMPILED_TWICE(inverse_plain,
               (const Inverse& f, const u32* in, u32* out, size_t stride, u32* buffer),
               (f, in, out, stride, buffer))

#if HAVE_AVX2

// The butterflies for q < 2^31. Values between passes are lazy, in [0, 2q), which fits 32 bits;
// the second operand of a sum is always in [0, q). Radix 4: two levels of the tree per pass. The
// recursion goes depth first, so that all but the first passes stay in the first-level cache.

AVX2 INLINE __m256i load(const u32* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
AVX2 INLINE void store(u32* p, __m256i v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}
// [0, 2q) -> [0, q): the subtraction wraps to something larger where x < q.
AVX2 INLINE __m256i reduced(__m256i x, __m256i q) {
  return _mm256_min_epu32(x, _mm256_sub_epi32(x, q));
}
AVX2 INLINE __m256i plus(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
AVX2 INLINE __m256i minus(__m256i a, __m256i b, __m256i q) {
  return _mm256_add_epi32(_mm256_sub_epi32(a, b), q);
}

struct Wide {  // a Factor in all lanes
  __m256i w, quotient;
};
AVX2 INLINE Wide wide(Factor f) {
  return {_mm256_set1_epi32(static_cast<i32>(f.w)), _mm256_set1_epi32(static_cast<i32>(f.quotient))};
}
// x * w mod q, in [0, q), for every 32-bit x.
AVX2 INLINE __m256i times(__m256i x, const Wide& f, __m256i q) {
  const __m256i even = _mm256_mul_epu32(x, f.quotient);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), f.quotient);
  const __m256i high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  const __m256i r = _mm256_sub_epi32(_mm256_mullo_epi32(x, f.w), _mm256_mullo_epi32(high, q));
  return reduced(r, q);
}

struct Quad {  // four rows
  u32* row[4];
};
struct ConstQuad {
  const u32* row[4];
};

// One pass for a node x^m - c: rows j, j + m/4, ... become the same rows of its four grandchildren.
// PRESENT input rows are not zero. At the root the factors are 1, 1 and i.
template <int PRESENT, bool ROOT, bool LAST>
AVX2 INLINE void split(const ConstQuad& in, const Quad& out, const Factor* f, size_t node, u32 q32) {
  const __m256i q = _mm256_set1_epi32(static_cast<i32>(q32));
  const Wide s1 = wide(f[node]), s2 = wide(f[2 * node]), s3 = wide(f[2 * node + 1]);
  for (size_t c = 0; c < WIDTH; c += 8) {
    const __m256i a0 = reduced(load(in.row[0] + c), q);
    __m256i b0 = a0, b2 = a0, b1 = a0, b3 = a0;
    if (PRESENT > 2) {
      __m256i u = load(in.row[2] + c);
      u = ROOT ? reduced(u, q) : times(u, s1, q);
      b0 = reduced(plus(a0, u), q);
      b2 = reduced(minus(a0, u, q), q);
    }
    if (PRESENT > 1) b1 = b3 = load(in.row[1] + c);
    if (PRESENT > 3) {
      const __m256i a1 = reduced(b1, q);
      __m256i v = load(in.row[3] + c);
      v = ROOT ? reduced(v, q) : times(v, s1, q);
      b1 = plus(a1, v);
      b3 = minus(a1, v, q);
    }
    __m256i c0 = b0, c1 = b0, c2 = b2, c3 = b2;
    if (PRESENT > 1) {
      const __m256i x = ROOT ? reduced(b1, q) : times(b1, s2, q), y = times(b3, s3, q);
      c0 = plus(b0, x);
      c1 = minus(b0, x, q);
      c2 = plus(b2, y);
      c3 = minus(b2, y, q);
    }
    store(out.row[0] + c, LAST ? reduced(c0, q) : c0);
    store(out.row[1] + c, LAST ? reduced(c1, q) : c1);
    store(out.row[2] + c, LAST ? reduced(c2, q) : c2);
    store(out.row[3] + c, LAST ? reduced(c3, q) : c3);
  }
}

template <bool ROOT, bool LAST>
AVX2 void split_present(int present, const ConstQuad& in, const Quad& out, const Factor* f,
                        size_t node, u32 q) {
  switch (present) {
    case 1: return split<1, ROOT, LAST>(in, out, f, node, q);
    case 2: return split<2, ROOT, LAST>(in, out, f, node, q);
    case 3: return split<3, ROOT, LAST>(in, out, f, node, q);
    default: return split<4, ROOT, LAST>(in, out, f, node, q);
  }
}

// dest = source times factor, WIDTH elements.
AVX2 void scale_row(const u32* source, u32* dest, Factor factor, u32 q32) {
  const __m256i q = _mm256_set1_epi32(static_cast<i32>(q32));
  const Wide f = wide(factor);
  for (size_t c = 0; c < WIDTH; c += 8) store(dest + c, times(load(source + c), f, q));
}

bool is_odd_power(size_t m) { return (m & 0x5555555555555555u) == 0; }

struct ForwardTile {
  const Forward& f;
  const Tree& tree;
  u32* out;
  size_t stride;
  u32* scratch;  // one row for leaves that nobody wants

  u32* leaf(size_t number) const {
    const std::int64_t row = tree.row[number];
    return row < 0 ? scratch : out + static_cast<size_t>(row) * stride;
  }

  // Reduces the `live` non-zero rows of the node, `step` apart, down to its leaves.
  AVX2 void descend(size_t node, const u32* in, size_t step, size_t live, u32* rows, size_t m) const {
    const bool root = m == tree.size;
    if (m == 1) return scale_row(in, leaf(node), tree.multipliers[node], tree.q);
    if (root && is_odd_power(m)) return descend_by_two(in, step, live, rows, m);
    const size_t quarter = m / 4;
    for (size_t j = 0; j < std::min(live, quarter); ++j) {
      const int present = static_cast<int>((live - j + quarter - 1) / quarter);
      ConstQuad source;
      Quad target;
      for (size_t i = 0; i < 4; ++i) {
        // Rows that are not there may lie beyond the array: never form their address.
        source.row[i] = in + (static_cast<int>(i) < present ? j + i * quarter : j) * step;
        target.row[i] = m == 4 ? leaf(4 * node + i) : rows + (j + i * quarter) * WIDTH;
      }
      const Factor* factors = tree.factors.data();
      if (m == 4)
        root ? split_present<true, true>(present, source, target, factors, node, tree.q)
             : split_present<false, true>(present, source, target, factors, node, tree.q);
      else
        root ? split_present<true, false>(present, source, target, factors, node, tree.q)
             : split_present<false, false>(present, source, target, factors, node, tree.q);
    }
    if (m > 4)
      for (size_t i = 0; i < 4; ++i) child(4 * node + i, rows + i * quarter * WIDTH, quarter, live);
    else if (f.scaled)
      for (size_t i = 4 * node; i < 4 * node + 4; ++i)
        if (tree.row[i] >= 0) scale_row(leaf(i), leaf(i), tree.multipliers[i], tree.q);
  }

  AVX2 void descend_by_two(const u32* in, size_t step, size_t live, u32* rows, size_t m) const {
    const __m256i q = _mm256_set1_epi32(static_cast<i32>(tree.q));
    const size_t half = m / 2;
    for (size_t j = 0; j < std::min(live, half); ++j)
      for (size_t c = 0; c < WIDTH; c += 8) {
        const __m256i a = load(in + j * step + c);
        const bool both = j + half < live;
        const __m256i b = both ? load(in + (j + half) * step + c) : _mm256_setzero_si256();
        store(rows + j * WIDTH + c, plus(a, b));
        store(rows + (j + half) * WIDTH + c, both ? minus(a, b, q) : a);
      }
    for (size_t i = 0; i < 2; ++i) child(i, rows + i * half * WIDTH, half, live);
  }

  AVX2 void child(size_t node, u32* rows, size_t m, size_t live) const {
    if (!tree.is_idle(node, m)) descend(node, rows, WIDTH, std::min(live, m), rows, m);
  }
};

// The inverse pass; NEED output rows are wanted. Rows that are leaves come with multipliers.
template <int NEED, bool ROOT>
AVX2 INLINE void merge(const ConstQuad& in, const Quad& out, const Factor* f, size_t node, u32 q32,
                       const Factor* multipliers) {
  const __m256i q = _mm256_set1_epi32(static_cast<i32>(q32));
  const bool leaves = multipliers != nullptr;
  Wide scale[4];
  for (int i = 0; i < 4; ++i) scale[i] = wide(leaves ? multipliers[i] : Factor(0, q32));
  const auto row = [&](int i, size_t c) __attribute__((always_inline, target("avx2"))) {
    const __m256i x = load(in.row[i] + c);
    return leaves ? times(x, scale[i], q) : reduced(x, q);
  };
  const Wide s1 = wide(f[node]), s2 = wide(f[2 * node]), s3 = wide(f[2 * node + 1]);
  for (size_t c = 0; c < WIDTH; c += 8) {
    const __m256i c0 = row(0, c), c1 = row(1, c), c2 = row(2, c), c3 = row(3, c);
    const __m256i b0 = reduced(plus(c0, c1), q), b2 = reduced(plus(c2, c3), q);
    const __m256i a0 = plus(b0, b2);
    store(out.row[0] + c, ROOT ? reduced(a0, q) : a0);
    if (NEED > 2) {
      const __m256i a2 = minus(b0, b2, q);
      store(out.row[2] + c, ROOT ? reduced(a2, q) : times(a2, s1, q));
    }
    if (NEED > 1) {
      __m256i b1 = minus(c0, c1, q);
      b1 = ROOT ? reduced(b1, q) : times(b1, s2, q);
      const __m256i b3 = times(minus(c2, c3, q), s3, q);
      const __m256i a1 = plus(b1, b3);
      store(out.row[1] + c, ROOT ? reduced(a1, q) : a1);
      if (NEED > 3) {
        const __m256i a3 = minus(b1, b3, q);
        store(out.row[3] + c, ROOT ? reduced(a3, q) : times(a3, s1, q));
      }
    }
  }
}

template <bool ROOT>
AVX2 void merge_needed(int need, const ConstQuad& in, const Quad& out, const Factor* f, size_t node,
                       u32 q, const Factor* multipliers) {
  switch (need) {
    case 1: return merge<1, ROOT>(in, out, f, node, q, multipliers);
    case 2: return merge<2, ROOT>(in, out, f, node, q, multipliers);
    case 3: return merge<3, ROOT>(in, out, f, node, q, multipliers);
    default: return merge<4, ROOT>(in, out, f, node, q, multipliers);
  }
}

struct InverseTile {
  const Inverse& f;
  const Tree& tree;
  const u32* in;
  u32* out;
  size_t stride;
  const u32* zeros;  // a row for the leaves that are zero

  const u32* leaf(size_t number) const {
    const std::int64_t row = tree.row[number];
    return row < 0 ? zeros : in + static_cast<size_t>(row) * stride;
  }

  // Makes the first `need` rows of the node from its leaves.
  AVX2 void climb(size_t node, u32* rows, size_t m, size_t need) const {
    const bool root = m == tree.size;
    if (!root && tree.is_idle(node, m)) {
      std::memset(rows, 0, need * WIDTH * sizeof(u32));
      return;
    }
    if (m == 1) return scale_row(leaf(node), root ? out : rows, tree.multipliers[node], tree.q);
    if (root && is_odd_power(m)) return climb_by_two(rows, m, need);
    const size_t quarter = m / 4;
    if (m > 4)
      for (size_t i = 0; i < 4; ++i)
        climb(4 * node + i, rows + i * quarter * WIDTH, quarter, std::min(need, quarter));
    for (size_t j = 0; j < std::min(need, quarter); ++j) {
      const int wanted = static_cast<int>((need - j + quarter - 1) / quarter);
      ConstQuad source;
      Quad target;
      for (size_t i = 0; i < 4; ++i) {
        const size_t row = j + i * quarter;
        source.row[i] = m == 4 ? leaf(4 * node + i) : rows + row * WIDTH;
        // Rows that nobody wants may lie beyond the array: never form their address.
        target.row[i] = !root ? rows + row * WIDTH : out + (row < need ? row : j) * stride;
      }
      const Factor* factors = tree.factors.data();
      const Factor* multipliers = m == 4 ? tree.multipliers.data() + 4 * node : nullptr;
      root ? merge_needed<true>(wanted, source, target, factors, node, tree.q, multipliers)
           : merge_needed<false>(wanted, source, target, factors, node, tree.q, multipliers);
    }
  }

  AVX2 void climb_by_two(u32* rows, size_t m, size_t need) const {
    const __m256i q = _mm256_set1_epi32(static_cast<i32>(tree.q));
    const size_t half = m / 2;
    for (size_t i = 0; i < 2; ++i) climb(i, rows + i * half * WIDTH, half, std::min(need, half));
    for (size_t j = 0; j < std::min(need, half); ++j)
      for (size_t c = 0; c < WIDTH; c += 8) {
        const __m256i a = reduced(load(rows + j * WIDTH + c), q);
        const __m256i b = reduced(load(rows + (j + half) * WIDTH + c), q);
        store(out + j * stride + c, reduced(plus(a, b), q));
        if (j + half < need) store(out + (j + half) * stride + c, reduced(minus(a, b, q), q));
      }
  }
};

bool has_butterflies(u32 q) { return has_avx2() && q < u32{1} << 31; }

#endif

void transform(const Forward& f, const u32* in, u32* out, size_t stride, u32* buffer) {
#if HAVE_AVX2
  if (has_butterflies(f.tree.q)) {
    if (f.coefficient) {
      for (size_t row = 0; row < f.rows; ++row)
        scale_row(in + row * stride, buffer + row * WIDTH, f.coefficient[row], f.tree.q);
      in = buffer;
    }
    const ForwardTile tile{f, f.tree, out, stride, buffer + f.tree.size * WIDTH};
    return tile.descend(0, in, f.coefficient ? WIDTH : stride, f.rows, buffer, f.tree.size);
  }
#endif
  forward_plain(f, in, out, stride, buffer);
}

void transform(const Inverse& f, const u32* in, u32* out, size_t stride, u32* buffer) {
#if HAVE_AVX2
  if (has_butterflies(f.tree.q)) {
    const InverseTile tile{f, f.tree, in, out, stride, buffer + f.tree.size * WIDTH};
    return tile.climb(0, buffer, f.tree.size, f.coefficients);
  }
#endif
  inverse_plain(f, in, out, stride, buffer);
}

// Transforms n columns, WIDTH at a time. The last tile overlaps its predecessor instead of being
// narrower; an array of fewer columns is copied to one that is wide enough.
template <class Transform>
void transform_columns(const Transform& f, const u32* in, size_t rows_in, u32* out, size_t rows_out,
                       size_t n) {
  if (n < WIDTH) {
    std::vector<u32> source(rows_in * WIDTH, 0), target(rows_out * WIDTH);
    for (size_t row = 0; row < rows_in; ++row) std::copy_n(in + row * n, n, &source[row * WIDTH]);
    transform_columns(f, source.data(), rows_in, target.data(), rows_out, WIDTH);
    for (size_t row = 0; row < rows_out; ++row) std::copy_n(&target[row * WIDTH], n, out + row * n);
    return;
  }
  in_parallel(n, 16 * WIDTH, [&](size_t begin, size_t end) {
    std::vector<u32> buffer((f.tree.size + 1) * WIDTH, 0);  // one row more: scratch, or zeros
    for (size_t column = begin; column < end; column += WIDTH) {
      const size_t start = std::min(column, end - WIDTH);
      transform(f, in + start, out + start, n, buffer.data());
    }
  });
}

}  // namespace

// -- the C ABI ----------------------------------------------------------------------------------

EXPORT int lightsecagg_abi() { return 1; }

EXPORT void lightsecagg_set_threads(int count) { thread_limit = std::max(count, 1); }

EXPORT int lightsecagg_has_avx2() { return has_avx2(); }

EXPORT void lightsecagg_allow_avx2(int allowed) { avx2_allowed = allowed != 0; }

EXPORT void lightsecagg_add(const u32* a, const u32* b, u32* out, size_t n, u32 q) {
  in_parallel(n, GRAIN, [=](size_t i, size_t end) { add(a + i, b + i, out + i, end - i, q); });
}

EXPORT void lightsecagg_subtract(const u32* a, const u32* b, u32* out, size_t n, u32 q) {
  in_parallel(n, GRAIN, [=](size_t i, size_t end) { subtract(a + i, b + i, out + i, end - i, q); });
}

EXPORT void lightsecagg_accumulate(u64* totals, const u32* const* vectors, size_t count, size_t n) {
  in_parallel(n, GRAIN, [=](size_t i, size_t end) { accumulate(totals, vectors, count, i, end); });
}

EXPORT void lightsecagg_accumulate_words(u32* totals, const u32* const* vectors, size_t count,
                                         size_t n) {
  in_parallel(n, GRAIN,
              [=](size_t i, size_t end) { accumulate_words(totals, vectors, count, i, end); });
}

EXPORT void lightsecagg_weighted_accumulate(u64* totals, const u32* const* vectors,
                                            const u32* weights, size_t count, size_t n) {
  in_parallel(n, GRAIN, [=](size_t i, size_t end) {
    weighted_accumulate(totals, vectors, weights, count, i, end);
  });
}

EXPORT void lightsecagg_reduce(const u64* totals, u32* out, size_t n, u32 q) {
  const Barrett reduce(q);
  in_parallel(n, GRAIN, [=](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) out[i] = reduce(totals[i]);
  });
}

EXPORT void lightsecagg_matmul(const u32* a, const u32* b, u32* out, size_t m, size_t k, size_t n,
                               u32 q) {
  if (m && n) matmul(a, b, out, m, k, n, q);
}

EXPORT void lightsecagg_quantise_mask32(const float* x, double scale, double limit,
                                        const u32* uniforms, const u32* mask, u32* out, size_t n,
                                        u32 q) {
  quantise_mask(x, scale, limit, uniforms, mask, out, n, q);
}

EXPORT void lightsecagg_quantise_mask64(const double* x, double scale, double limit,
                                        const u32* uniforms, const u32* mask, u32* out, size_t n,
                                        u32 q) {
  quantise_mask(x, scale, limit, uniforms, mask, out, n, q);
}

EXPORT void lightsecagg_unmask_dequantise32(const u32* masked, const u32* mask, double scale, u32 q,
                                            float* out, size_t n) {
  in_parallel(n, GRAIN, [=](size_t i, size_t end) {
    unmask_dequantise32(masked + i, mask + i, scale, q, out + i, end - i);
  });
}

EXPORT void lightsecagg_unmask_dequantise64(const u32* masked, const u32* mask, double scale, u32 q,
                                            double* out, size_t n) {
  in_parallel(n, GRAIN, [=](size_t i, size_t end) {
    unmask_dequantise64(masked + i, mask + i, scale, q, out + i, end - i);
  });
}

EXPORT u64 lightsecagg_quantise_pack(const float* v, size_t n, double scale, const u16* coins,
                                     i32 levels, const i32* places, size_t slots, const u32* mask,
                                     u32* out, size_t elements, u32 q) {
  std::atomic<u64> cut{0};
  in_parallel(elements, GRAIN, [&](size_t begin, size_t end) {
    const DefaultArithmetic mode;
    u64 here;
    quantise_pack(v, n, static_cast<float>(scale), coins, levels, {places, slots, elements}, mask,
                  out, begin, end, q, &here);
    cut += here;
  });
  return cut;
}

EXPORT void lightsecagg_unpack(const u32* total, const i32* bases, const double* factors,
                               size_t slots, size_t elements, float* out, size_t n, u32 q) {
  in_parallel(elements, GRAIN, [=](size_t begin, size_t end) {
    const DefaultArithmetic mode;
    unpack(total, bases, factors, slots, elements, out, n, begin, end, q);
  });
}

EXPORT void lightsecagg_rotate_blocks32(const float* x, size_t given, double factor,
                                        const u32* before, const u32* after, size_t block,
                                        float* out, size_t n) {
  rotate_blocks(x, given, factor, before, after, block, out, n);
}

EXPORT void lightsecagg_rotate_blocks64(const double* x, size_t given, double factor,
                                        const u32* before, const u32* after, size_t block,
                                        float* out, size_t n) {
  rotate_blocks(x, given, factor, before, after, block, out, n);
}

EXPORT void lightsecagg_rotate_strided(float* x, size_t rows, double factor, size_t n) {
  rotate_strided(x, rows, factor, n);
}

EXPORT void lightsecagg_sum_of_squares32(const float* x, size_t n, double* total) {
  const DefaultArithmetic mode;
  sum_of_squares32(x, n, total);
}

EXPORT void lightsecagg_sum_of_squares64(const double* x, size_t n, double* total) {
  const DefaultArithmetic mode;
  sum_of_squares64(x, n, total);
}

EXPORT size_t lightsecagg_find_out_of_range(const u32* x, size_t n, u32 q) {
  size_t position;
  find_out_of_range(x, n, q, &position);
  return position;
}

EXPORT size_t lightsecagg_cut_and_find(u32* words, size_t n, u32 mask, u32 q,
                                       std::int64_t* positions, size_t capacity) {
  size_t count;
  cut_and_find(words, n, mask, q, positions, capacity, &count);
  return count;
}

EXPORT size_t lightsecagg_find_beyond32(const float* x, size_t n, double bound) {
  size_t position;
  find_beyond32(x, n, bound, &position);
  return position;
}

EXPORT size_t lightsecagg_find_beyond64(const double* x, size_t n, double bound) {
  size_t position;
  find_beyond64(x, n, bound, &position);
  return position;
}

EXPORT void lightsecagg_ntt_forward(const u32* in, const u32* scales, size_t rows, u32* out,
                                    const std::int64_t* positions, const u32* multipliers,
                                    size_t leaves, const u32* roots, size_t size, size_t n, u32 q) {
  if (!n) return;
  std::vector<Factor> coefficients;
  for (size_t row = 0; scales && row < rows; ++row) coefficients.emplace_back(scales[row], q);
  const std::vector<u32> ones(leaves, 1);
  const Tree tree(roots, size, positions, multipliers ? multipliers : ones.data(), leaves, q);
  const Forward f{tree, rows, scales ? coefficients.data() : nullptr, multipliers != nullptr};
  transform_columns(f, in, rows, out, leaves, n);
}

EXPORT void lightsecagg_ntt_inverse(const u32* in, const std::int64_t* positions,
                                    const u32* multipliers, size_t rows, u32* out,
                                    size_t coefficients, const u32* inverse_roots, size_t size,
                                    size_t n, u32 q) {
  if (!n) return;
  const Tree tree(inverse_roots, size, positions, multipliers, rows, q);
  transform_columns(Inverse{tree, coefficients}, in, rows, out, coefficients, n);
}

EXPORT void lightsecagg_add_popcount_noise(const u32* words, u32* z, size_t n, u32 step, u32 q) {
  in_parallel(n, GRAIN, [=](size_t i, size_t end) {
    add_popcount_noise(words + 8 * i, z + i, end - i, step, q);
  });
}
