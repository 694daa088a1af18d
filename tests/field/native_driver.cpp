// Calls the native loops with the cases of native_vectors.py and compares what comes back.
//
//     driver FILE THREADS AVX2 REPEATS
//
// So the loops are tried where no Python is: built with any compiler, under any sanitizer, for any
// machine. Every argument lies in an allocation of its own, of exactly its size. Each case is called
// once and compared, then called REPEATS times more: two runs with different numbers of repeats tell
// how many instructions one call takes.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;
using std::size_t;

extern "C" {
int lightsecagg_abi();
void lightsecagg_set_threads(int);
int lightsecagg_has_avx2();
void lightsecagg_allow_avx2(int);
void lightsecagg_add(const u32*, const u32*, u32*, size_t, u32);
void lightsecagg_subtract(const u32*, const u32*, u32*, size_t, u32);
void lightsecagg_accumulate(u64*, const u32* const*, size_t, size_t);
void lightsecagg_accumulate_words(u32*, const u32* const*, size_t, size_t);
void lightsecagg_weighted_accumulate(u64*, const u32* const*, const u32*, size_t, size_t);
void lightsecagg_reduce(const u64*, u32*, size_t, u32);
void lightsecagg_matmul(const u32*, const u32*, u32*, size_t, size_t, size_t, u32);
void lightsecagg_quantise_mask32(const float*, double, double, const u32*, const u32*, u32*, size_t,
                                 u32);
void lightsecagg_quantise_mask64(const double*, double, double, const u32*, const u32*, u32*, size_t,
                                 u32);
void lightsecagg_unmask_dequantise32(const u32*, const u32*, double, u32, float*, size_t);
void lightsecagg_unmask_dequantise64(const u32*, const u32*, double, u32, double*, size_t);
u64 lightsecagg_quantise_pack(const float*, size_t, double, const u16*, i32, const i32*, size_t,
                              const u32*, u32*, size_t, u32);
void lightsecagg_unpack(const u32*, const i32*, const double*, size_t, size_t, float*, size_t, u32);
void lightsecagg_rotate_blocks32(const float*, size_t, double, const u32*, const u32*, size_t,
                                 float*, size_t);
void lightsecagg_rotate_blocks64(const double*, size_t, double, const u32*, const u32*, size_t,
                                 float*, size_t);
void lightsecagg_rotate_strided(float*, size_t, double, size_t);
void lightsecagg_sum_of_squares32(const float*, size_t, double*);
void lightsecagg_sum_of_squares64(const double*, size_t, double*);
size_t lightsecagg_find_out_of_range(const u32*, size_t, u32);
size_t lightsecagg_cut_and_find(u32*, size_t, u32, u32, i64*, size_t);
size_t lightsecagg_find_beyond32(const float*, size_t, double);
size_t lightsecagg_find_beyond64(const double*, size_t, double);
void lightsecagg_ntt_forward(const u32*, const u32*, size_t, u32*, const i64*, const u32*, size_t,
                             const u32*, size_t, size_t, u32);
void lightsecagg_ntt_inverse(const u32*, const i64*, const u32*, size_t, u32*, size_t, const u32*,
                             size_t, size_t, u32);
void lightsecagg_add_popcount_noise(const u32*, u32*, size_t, u32, u32);
}

namespace {

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

struct Allocation {  // of exactly `size` bytes, so that a step beyond it is seen
  std::vector<unsigned char> bytes;
  void* data() { return bytes.empty() ? nullptr : bytes.data(); }
};

// One argument: an array, an array of arrays, a number, or nothing.
struct Argument {
  char kind = 0;
  u64 number = 0;
  double real = 0;
  Allocation array, expected;  // expected: what an array must hold after the call
  std::vector<Allocation> arrays;
  std::vector<void*> table;
};

struct Case {
  std::string name;
  std::vector<Argument> arguments;
  u64 result = 0;  // of a loop that returns something
};

// -- the file -----------------------------------------------------------------------------------

class Reader {
 public:
  explicit Reader(const char* path) : file_(path, std::ios::binary) {
    if (!file_) fail(std::string("cannot open ") + path);
  }

  bool at_end() { return file_.peek() == std::ifstream::traits_type::eof(); }

  Case next() {
    Case result;
    const Allocation name = allocation();
    result.name.assign(name.bytes.begin(), name.bytes.end());
    for (u64 left = word(); left; --left) result.arguments.push_back(argument());
    result.result = word();
    return result;
  }

 private:
  std::ifstream file_;

  void read(void* target, size_t size) {
    if (!file_.read(static_cast<char*>(target), static_cast<std::streamsize>(size)))
      fail("the file of cases ends early");
  }

  u64 word() {
    u64 value;
    read(&value, sizeof value);
    return value;
  }

  Allocation allocation() {
    Allocation result;
    result.bytes.resize(word());
    if (!result.bytes.empty()) read(result.bytes.data(), result.bytes.size());
    return result;
  }

  Argument argument() {
    Argument result;
    read(&result.kind, 1);
    switch (result.kind) {
      case '0': break;  // a null pointer
      case 'i': result.number = word(); break;
      case 'f': read(&result.real, sizeof result.real); break;
      case 'a': result.array = allocation(); break;
      case 'o':
        result.array = allocation();
        result.expected = allocation();
        break;
      case 't':
        for (u64 left = word(); left; --left) result.arrays.push_back(allocation());
        break;
      default: fail("an argument of unknown kind");
    }
    return result;
  }
};

// -- the calls ----------------------------------------------------------------------------------

template <class T>
T as(Argument& argument) {
  if constexpr (std::is_same_v<T, double>) {
    return argument.real;
  } else if constexpr (std::is_same_v<T, const u32* const*>) {
    argument.table.clear();
    for (Allocation& array : argument.arrays) argument.table.push_back(array.data());
    return reinterpret_cast<T>(argument.table.data());
  } else if constexpr (std::is_pointer_v<T>) {
    return argument.kind == '0' ? nullptr : static_cast<T>(argument.array.data());
  } else {
    return static_cast<T>(argument.number);
  }
}

using Call = std::function<u64(std::vector<Argument>&)>;

template <class Result, class... P, size_t... I>
Call call(Result (*loop)(P...), std::index_sequence<I...>) {
  return [loop](std::vector<Argument>& arguments) -> u64 {
    if (arguments.size() != sizeof...(P)) fail("the case has another number of arguments");
    if constexpr (std::is_void_v<Result>) {
      loop(as<P>(arguments[I])...);
      return 0;
    } else {
      return loop(as<P>(arguments[I])...);
    }
  };
}

template <class Result, class... P>
Call call(Result (*loop)(P...)) {
  return call(loop, std::index_sequence_for<P...>());
}

const std::map<std::string, Call> LOOPS = {
#define LOOP(name) {#name, call(lightsecagg_##name)}
    LOOP(add),
    LOOP(subtract),
    LOOP(accumulate),
    LOOP(accumulate_words),
    LOOP(weighted_accumulate),
    LOOP(reduce),
    LOOP(matmul),
    LOOP(quantise_mask32),
    LOOP(quantise_mask64),
    LOOP(unmask_dequantise32),
    LOOP(unmask_dequantise64),
    LOOP(quantise_pack),
    LOOP(unpack),
    LOOP(rotate_blocks32),
    LOOP(rotate_blocks64),
    LOOP(rotate_strided),
    LOOP(sum_of_squares32),
    LOOP(sum_of_squares64),
    LOOP(find_out_of_range),
    LOOP(cut_and_find),
    LOOP(find_beyond32),
    LOOP(find_beyond64),
    LOOP(ntt_forward),
    LOOP(ntt_inverse),
    LOOP(add_popcount_noise),
#undef LOOP
};

void check(Case given, size_t number, int repeats) {
  const std::string where = given.name + " (case " + std::to_string(number) + ")";
  const auto loop = LOOPS.find(given.name);
  if (loop == LOOPS.end()) fail("no loop " + where);
  if (loop->second(given.arguments) != given.result) fail("a wrong result of " + where);
  for (const Argument& argument : given.arguments)
    if (argument.kind == 'o' && argument.array.bytes != argument.expected.bytes)
      fail("a wrong array from " + where);
  for (int i = 0; i < repeats; ++i) loop->second(given.arguments);
}

}  // namespace

int main(int count, char** words) try {
  if (count != 5) fail("usage: driver FILE THREADS AVX2 REPEATS");
  lightsecagg_set_threads(std::atoi(words[2]));
  lightsecagg_allow_avx2(std::atoi(words[3]));
  const int repeats = std::atoi(words[4]);
  std::map<std::string, size_t> checked;
  size_t number = 0;
  for (Reader reader(words[1]); !reader.at_end(); ++number) {
    Case next = reader.next();
    ++checked[next.name];
    check(std::move(next), number, repeats);
  }
  std::printf("%zu cases of %zu loops agree (AVX2 %s)\n", number, checked.size(),
              lightsecagg_has_avx2() ? "on" : "off");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
