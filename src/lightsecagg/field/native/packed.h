// The loops of packed updates; a part of kernels.cpp, which defines what they use.

// -- packing ------------------------------------------------------------------------------------

// A tile of elements stays in the first-level cache while all slots pass by.
constexpr size_t PACK_TILE = 2048;

struct Slots {
  const i32* places;  // what one quantum of each slot adds to an element
  size_t count;
  size_t elements;  // slot j holds the entries from j * elements on
};

INLINE void quantise_pack_loop(const float* v, size_t n, float scale, const u16* coins, i32 levels,
                               const Slots& slots, const u32* mask, u32* out, size_t begin,
                               size_t end, u32 q, u64* cut) {
  const float most = static_cast<float>(levels + 1);
  i32 sums[PACK_TILE];
  *cut = 0;
  for (size_t start = begin; start < end; start += PACK_TILE) {
    const size_t count = std::min(PACK_TILE, end - start);
    std::fill_n(sums, count, 0);
    for (size_t slot = 0; slot < slots.count; ++slot) {
      const size_t first = slot * slots.elements + start;
      if (first >= n) break;
      const size_t here = std::min(count, n - first);
      const i32 place = slots.places[slot];
      u32 beyond = 0;
      for (size_t i = 0; i < here; ++i) {
        float y = v[first + i] * scale;
        y += static_cast<float>(coins[first + i]) * 0x1p-16f;
        y = y < most ? y : most;
        y = y > -most ? y : -most;
        // Truncating and correcting is a floor that needs no library call.
        i32 z = static_cast<i32>(y);
        z -= y < static_cast<float>(z) ? 1 : 0;
        i32 kept = z < levels ? z : levels;
        kept = kept > -levels ? kept : -levels;
        beyond += kept != z ? 1 : 0;
        sums[i] += kept * place;
      }
      *cut += beyond;
    }
    for (size_t i = 0; i < count; ++i) {
      const u32 element = static_cast<u32>(sums[i]) + (sums[i] < 0 ? q : 0);
      sums[i] = static_cast<i32>(add_one(element, mask[start + i], q));
    }
    std::memcpy(out + start, sums, count * sizeof(u32));  // out may be the mask
  }
}
COMPILED_TWICE(quantise_pack,
               (const float* v, size_t n, float scale, const u16* coins, i32 levels,
                const Slots& slots, const u32* mask, u32* out, size_t begin, size_t end, u32 q,
                u64* cut),
               (v, n, scale, coins, levels, slots, mask, out, begin, end, q, cut))

INLINE void unpack_loop(const u32* total, const i32* bases, const double* factors, size_t slots,
                        size_t elements, float* out, size_t n, size_t begin, size_t end, u32 q) {
  constexpr double integer = 6755399441055744.0;  // added and subtracted, it rounds
  const u32 half = (q - 1) / 2;
  i32 rest[PACK_TILE];
  for (size_t start = begin; start < end; start += PACK_TILE) {
    const size_t count = std::min(PACK_TILE, end - start);
    for (size_t i = 0; i < count; ++i)
      rest[i] = static_cast<i32>(total[start + i] - (total[start + i] >= half ? q : 0));
    for (size_t slot = 0; slot < slots; ++slot) {
      const size_t first = slot * elements + start;
      if (first >= n) break;
      const size_t here = std::min(count, n - first);
      const double factor = factors[slot];
      if (slot + 1 == slots) {
        for (size_t i = 0; i < here; ++i)
          out[first + i] = static_cast<float>(static_cast<double>(rest[i]) * factor);
        break;
      }
      // An odd base has no ties, so the inverse need not be exact.
      const u32 base = static_cast<u32>(bases[slot]);
      const double inverse = 1.0 / static_cast<double>(bases[slot]);
      for (size_t i = 0; i < here; ++i) {
        const double quotient = (static_cast<double>(rest[i]) * inverse + integer) - integer;
        const i32 higher = static_cast<i32>(quotient);
        const u32 digit = static_cast<u32>(rest[i]) - base * static_cast<u32>(higher);
        out[first + i] =
            static_cast<float>(static_cast<double>(static_cast<i32>(digit)) * factor);
        rest[i] = higher;
      }
    }
  }
}
COMPILED_TWICE(unpack,
               (const u32* total, const i32* bases, const double* factors, size_t slots,
                size_t elements, float* out, size_t n, size_t begin, size_t end, u32 q),
               (total, bases, factors, slots, elements, out, n, begin, end, q))

// -- rotation -----------------------------------------------------------------------------------

// Every butterfly makes a + b and a - b of two numbers, stage after stage, so an output is one tree
// of additions however the stages are grouped: here three at a time, in registers.

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

template <size_t WIDTH>
INLINE void butterflies_8(float* x, size_t h) {
  INDEPENDENT
  for (size_t c = 0; c < WIDTH; ++c) {
    float* y = x + c;
    const float a0 = y[0], a1 = y[h], a2 = y[2 * h], a3 = y[3 * h];
    const float a4 = y[4 * h], a5 = y[5 * h], a6 = y[6 * h], a7 = y[7 * h];
    const float b0 = a0 + a1, b1 = a0 - a1, b2 = a2 + a3, b3 = a2 - a3;
    const float b4 = a4 + a5, b5 = a4 - a5, b6 = a6 + a7, b7 = a6 - a7;
    const float c0 = b0 + b2, c1 = b1 + b3, c2 = b0 - b2, c3 = b1 - b3;
    const float c4 = b4 + b6, c5 = b5 + b7, c6 = b4 - b6, c7 = b5 - b7;
    y[0] = c0 + c4, y[h] = c1 + c5, y[2 * h] = c2 + c6, y[3 * h] = c3 + c7;
    y[4 * h] = c0 - c4, y[5 * h] = c1 - c5, y[6 * h] = c2 - c6, y[7 * h] = c3 - c7;
  }
}

template <size_t WIDTH>
INLINE void butterflies_2(float* x, size_t h) {
  INDEPENDENT
  for (size_t c = 0; c < WIDTH; ++c) {
    const float a = x[c], b = x[c + h];
    x[c] = a + b;
    x[c + h] = a - b;
  }
}

// The stages from `first` to rows / 2 of rows of WIDTH numbers; rows and `first` are powers of two.
template <size_t WIDTH>
INLINE void transform_rows(float* x, size_t rows, size_t first) {
  size_t h = first;
  for (; 8 * h <= rows; h *= 8)
    for (size_t start = 0; start < rows; start += 8 * h)
      for (size_t row = start; row < start + h; ++row)
        butterflies_8<WIDTH>(x + row * WIDTH, h * WIDTH);
  for (; 2 * h <= rows; h *= 2)
    for (size_t start = 0; start < rows; start += 2 * h)
      for (size_t row = start; row < start + h; ++row)
        butterflies_2<WIDTH>(x + row * WIDTH, h * WIDTH);
}

INLINE void first_stages_loop(float* x, size_t n) {
  for (size_t i = 0; i < n; i += 8) transform_rows<1>(x + i, 8, 1);
}

#if HAVE_AVX2
AVX2 void first_stages_avx2(float* x, size_t n) {
  const __m256 odd = _mm256_set_ps(-0.f, 0.f, -0.f, 0.f, -0.f, 0.f, -0.f, 0.f);
  const __m256 pairs = _mm256_set_ps(-0.f, -0.f, 0.f, 0.f, -0.f, -0.f, 0.f, 0.f);
  const __m256 high = _mm256_set_ps(-0.f, -0.f, -0.f, -0.f, 0.f, 0.f, 0.f, 0.f);
  for (size_t i = 0; i < n; i += 8) {
    __m256 v = _mm256_loadu_ps(x + i);
    v = _mm256_add_ps(_mm256_permute_ps(v, 0xB1), _mm256_xor_ps(v, odd));
    v = _mm256_add_ps(_mm256_permute_ps(v, 0x4E), _mm256_xor_ps(v, pairs));
    v = _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, high));
    _mm256_storeu_ps(x + i, v);
  }
}
#endif

void first_stages(float* x, size_t n) {
#if HAVE_AVX2
  if (has_avx2()) return first_stages_avx2(x, n);
#endif
  first_stages_loop(x, n);
}

// Rows of one tile of columns; more of them are first transformed in parts that fit a cache.
constexpr size_t COLUMNS = 16;
constexpr size_t NEAR_ROWS = 4096;

INLINE void later_stages_loop(float* x, size_t rows) { transform_rows<8>(x, rows, 1); }
COMPILED_TWICE(later_stages, (float* x, size_t rows), (x, rows))

INLINE void all_stages_loop(float* x, size_t rows) {
  const size_t near = std::min(rows, NEAR_ROWS);
  for (size_t row = 0; row < rows; row += near) transform_rows<COLUMNS>(x + row * COLUMNS, near, 1);
  transform_rows<COLUMNS>(x, rows, near);
}
COMPILED_TWICE(all_stages, (float* x, size_t rows), (x, rows))

// Bit i % 32 of word i / 32 turns the sign of x[i].
INLINE void turn_signs_loop(float* x, const u32* words, size_t n) {
  u32 bits[32];
  for (size_t j = 0; j < 32; ++j) bits[j] = u32{1} << j;
  for (size_t i = 0; i < n; i += 32) {
    const u32 word = words[i / 32];
    if (n - i >= 32)
      for (size_t j = 0; j < 32; ++j) x[i + j] *= word & bits[j] ? -1.0f : 1.0f;
    else
      for (size_t j = 0; j < n - i; ++j) x[i + j] *= word & bits[j] ? -1.0f : 1.0f;
  }
}
COMPILED_TWICE(turn_signs, (float* x, const u32* words, size_t n), (x, words, n))

template <class T>
INLINE void weigh_body(const T* x, double factor, float* out, size_t n) {
  constexpr double most = 0x1p90;  // sums of 2^32 such numbers are finite
  constexpr size_t tile = 256;     // out may be x
  float tiled[tile];
  for (size_t start = 0; start < n; start += tile) {
    const size_t count = std::min(tile, n - start);
    for (size_t i = 0; i < count; ++i) {
      double y = static_cast<double>(x[start + i]) * factor;
      y = y < most ? y : most;
      y = y > -most ? y : -most;
      tiled[i] = static_cast<float>(y);
    }
    std::memcpy(out + start, tiled, count * sizeof(float));
  }
}
INLINE void weigh32_loop(const float* x, double factor, float* out, size_t n) {
  weigh_body(x, factor, out, n);
}
COMPILED_TWICE(weigh32, (const float* x, double factor, float* out, size_t n), (x, factor, out, n))
INLINE void weigh64_loop(const double* x, double factor, float* out, size_t n) {
  weigh_body(x, factor, out, n);
}
COMPILED_TWICE(weigh64, (const double* x, double factor, float* out, size_t n), (x, factor, out, n))

void weigh(const float* x, double factor, float* out, size_t n) { weigh32(x, factor, out, n); }
void weigh(const double* x, double factor, float* out, size_t n) { weigh64(x, factor, out, n); }

template <class T>
void rotate_blocks(const T* x, size_t given, double factor, const u32* before, const u32* after,
                   size_t block, float* out, size_t n) {
  // Several small blocks make a tile, which begins at a whole word of signs.
  const size_t tile = std::max<size_t>(block, 2048);
  in_parallel(n, std::max(tile, GRAIN), [=](size_t begin, size_t end) {
    const DefaultArithmetic mode;
    for (size_t start = begin; start < end; start += tile) {
      const size_t count = std::min(tile, end - start);
      const size_t real = start < given ? std::min(count, given - start) : 0;
      float* y = out + start;
      weigh(x + start, factor, y, real);
      std::fill(y + real, y + count, 0.0f);
      turn_signs(y, before + start / 32, count);
      first_stages(y, count);
      for (size_t i = 0; i < count; i += block) later_stages(y + i, block / 8);
      turn_signs(y, after + start / 32, count);
    }
  });
}

void rotate_strided(float* x, size_t rows, double factor, size_t n) {
  const size_t columns = n / rows;
  const float scale = static_cast<float>(factor);
  in_parallel(columns, std::max<size_t>(COLUMNS, GRAIN / rows), [=](size_t begin, size_t end) {
    const DefaultArithmetic mode;
    std::vector<float> tile(rows * COLUMNS, 0.0f);
    for (size_t column = begin; column < end; column += COLUMNS) {
      const size_t width = std::min(COLUMNS, end - column);
      for (size_t row = 0; row < rows; ++row)
        std::copy_n(x + row * columns + column, width, &tile[row * COLUMNS]);
      all_stages(tile.data(), rows);
      for (size_t row = 0; row < rows; ++row)
        for (size_t c = 0; c < width; ++c)
          x[row * columns + column + c] = tile[row * COLUMNS + c] * scale;
    }
  });
}

// Eight running sums, so that the order of additions is that of the reference.
template <class T>
INLINE void sum_of_squares_body(const T* x, size_t n, double* total) {
  double lanes[8] = {};
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (size_t lane = 0; lane < 8; ++lane) {
      const double y = static_cast<double>(x[i + lane]);
      lanes[lane] += y * y;
    }
  for (size_t lane = 0; i + lane < n; ++lane) {
    const double y = static_cast<double>(x[i + lane]);
    lanes[lane] += y * y;
  }
  *total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
           ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}
INLINE void sum_of_squares32_loop(const float* x, size_t n, double* total) {
  sum_of_squares_body(x, n, total);
}
COMPILED_TWICE(sum_of_squares32, (const float* x, size_t n, double* total), (x, n, total))
INLINE void sum_of_squares64_loop(const double* x, size_t n, double* total) {
  sum_of_squares_body(x, n, total);
}
COMPILED_TWICE(sum_of_squares64, (const double* x, size_t n, double* total), (x, n, total))
