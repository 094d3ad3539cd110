// Routed experts of different widths over the packed rows, for processors with AVX-512 BF16; see moe_cpu_rows.py.
//
// No header of torch or Python: moe_cpu_rows.py compiles this file where it runs and calls ragged_moe through ctypes.
// Letters: T tokens, H hidden size, K experts a token, E experts on this rank, S rows of all of them, P = T·K pairs of
// a token and one of its experts, w channels of an expert. A place is an expert's position in ExpertLayout.order.
//
// Pairs are sorted by expert. A first pass takes each row of gate and up times the tokens of its expert and leaves
// hidden activations; a second adds rows of the transposed down projection, each times its hidden activation; a third
// sums a token's experts. Few tokens read the weights once, front to back, as fast as memory gives them: no software
// prefetch and no more streams at once than needed, both were slower (log 74). Work is cut by rows in the first pass
// and by columns in the second, so every number is summed by one thread in one order, whatever the number of threads.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace {

typedef uint16_t bf16;  // bits of a bfloat16

constexpr int kBlock = 6;                     // tokens that share a load of the weights; 4 rows of 6 fill the registers
constexpr int64_t kMaxRows = 64;              // of gate, and as many of up, in a piece of work of the first pass
constexpr int64_t kCache = 1 << 18;           // numbers of the weights in a piece: half of a 1 MB second-level cache
constexpr int64_t kLeastColumns = 256;        // in a piece of the second pass
constexpr int64_t kPieces = 4;                // a thread, so that all end together
constexpr int64_t kTokens = 1024;             // run together; bounds the buffers
constexpr int64_t kLanes = 32;                // numbers of a vector; H is a multiple
constexpr int kDownRows = 8;                  // of the down projection that are added together; widths are multiples

inline __m512bh load(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

// out[m · kMaxRows] = w · x[m], for the few tokens of a decoding step: one row at a time
template <int M>
inline void dot_row(const bf16* w, const bf16* const* x, int64_t H, float* out) {
  __m512 sums[M][4];
  for (auto& token : sums)
    for (auto& sum : token) sum = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 4 * kLanes <= H; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512bh row = load(w + i + j * kLanes);
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m) sums[m][j] = _mm512_dpbf16_ps(sums[m][j], row, load(x[m] + i + j * kLanes));
    }
  }
  for (; i < H; i += kLanes)
    for (int m = 0; m < M; ++m) sums[m][0] = _mm512_dpbf16_ps(sums[m][0], load(w + i), load(x[m] + i));
  for (int m = 0; m < M; ++m) {
    const __m512 half = _mm512_add_ps(sums[m][0], sums[m][1]);
    out[m * kMaxRows] = _mm512_reduce_add_ps(_mm512_add_ps(half, _mm512_add_ps(sums[m][2], sums[m][3])));
  }
}

// out[m · kMaxRows + r] = w[r] · x[m] for 4 rows, where each number loaded is used several times
template <int M>
inline void dot_rows(const bf16* w, const bf16* const* x, int64_t H, float* out) {
  __m512 sums[4][M];
  for (auto& row : sums)
    for (auto& sum : row) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < H; i += kLanes) {
    const __m512bh rows[4] = {load(w + i), load(w + H + i), load(w + 2 * H + i), load(w + 3 * H + i)};
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m512bh token = load(x[m] + i);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) sums[r][m] = _mm512_dpbf16_ps(sums[r][m], rows[r], token);
    }
  }
  for (int r = 0; r < 4; ++r)
    for (int m = 0; m < M; ++m) out[m * kMaxRows + r] = _mm512_reduce_add_ps(sums[r][m]);
}

template <int M>
inline void dot_all(const bf16* w, const bf16* const* x, int64_t H, int64_t count, float* out) {
  if constexpr (M <= 2) {
    for (int64_t r = 0; r < count; ++r) dot_row<M>(w + r * H, x, H, out + r);
  } else {
    for (int64_t r = 0; r < count; r += 4) dot_rows<M>(w + r * H, x, H, out + r);
  }
}

// e^x: 2^n times a Taylor polynomial of what is left, at most ln(2)/2; 0 and infinity past the ends
inline __m512 exponential(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  const __m512 left = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147181f), x);
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, left, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(sum, n);
}

// h[m][r] = silu(gate[r] · x[m]) · (up[r] · x[m]) for `count` rows, a multiple of 16
template <int M>
void hidden_activations(const bf16* gate, const bf16* up, const bf16* const* x, int64_t H, int64_t count, bf16* h,
                        int64_t width) {
  float g[M][kMaxRows], u[M][kMaxRows];
  dot_all<M>(gate, x, H, count, g[0]);
  dot_all<M>(up, x, H, count, u[0]);
  for (int m = 0; m < M; ++m)
    for (int64_t r = 0; r < count; r += 16) {
      const __m512 value = _mm512_loadu_ps(g[m] + r);
      const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exponential(_mm512_sub_ps(_mm512_setzero_ps(), value)));
      const __m512 product = _mm512_mul_ps(_mm512_div_ps(value, below), _mm512_loadu_ps(u[m] + r));
      _mm256_storeu_si256((__m256i*)(h + m * width + r), (__m256i)_mm512_cvtneps_pbh(product));
    }
}

// sums[m] += Σ_r h[m][r] · w[r] over kDownRows rows and `columns`. A product of bfloat16 takes neighbours together, here
// two rows, so they are interleaved: of 32 columns, the first 16 sums are of columns 0-3, 8-11, 16-19, 24-27.
template <int M>
inline void add_rows(const bf16* w, int64_t H, int64_t columns, const bf16* h, int64_t width, float* sums) {
  constexpr int kPairs = kDownRows / 2;
  __m512i h_pairs[M][kPairs];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < kPairs; ++r) {
      int32_t pair;
      memcpy(&pair, h + m * width + 2 * r, sizeof(pair));
      h_pairs[m][r] = _mm512_set1_epi32(pair);
    }
  for (int64_t i = 0; i < columns; i += kLanes) {
    __m512bh low[kPairs], high[kPairs];
#pragma GCC unroll 4
    for (int r = 0; r < kPairs; ++r) {
      const __m512i even = (__m512i)load(w + 2 * r * H + i), odd = (__m512i)load(w + (2 * r + 1) * H + i);
      low[r] = (__m512bh)_mm512_unpacklo_epi16(even, odd);
      high[r] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      float* at = sums + m * H + i;
      __m512 first = _mm512_loadu_ps(at), second = _mm512_loadu_ps(at + 16);
#pragma GCC unroll 4
      for (int r = 0; r < kPairs; ++r) {
        first = _mm512_dpbf16_ps(first, low[r], (__m512bh)h_pairs[m][r]);
        second = _mm512_dpbf16_ps(second, high[r], (__m512bh)h_pairs[m][r]);
      }
      _mm512_storeu_ps(at, first);
      _mm512_storeu_ps(at + 16, second);
    }
  }
}

// Calls run with the number of tokens, at most kBlock, as a constant.
template <typename Run>
inline void with_block(int64_t tokens, Run&& run) {
  switch (tokens) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    case 4: return run(std::integral_constant<int, 4>());
    case 5: return run(std::integral_constant<int, 5>());
    default: return run(std::integral_constant<int, kBlock>());
  }
}

struct Piece {  // of the work on one expert: rows in the first pass, columns in the second
  int64_t place, start, count;
};

struct Experts {
  const bf16 *w13, *w2;  // [2, S, H] and [S, H]
  int64_t S, H, E;
  const int32_t *places, *offsets, *widths;  // ExpertLayout.table
  const int32_t* expert_map;                 // or null
  int64_t num_ids;                           // ids are below it: of the map, or E
};

enum Outcome { kDone, kOutOfMemory, kNoSuchExpert };

struct Plan {  // of one run: which pairs an expert has, and the pieces of work
  // the pairs of place e are starts[e]…starts[e + 1], their hidden activations begin at h_starts[e]
  std::vector<int64_t> starts, h_starts;
  std::vector<int64_t> sorted;      // where pair p stands among them, -1 for nowhere
  std::vector<const bf16*> tokens;  // of the pairs, in that order
  std::vector<Piece> row_pieces, column_pieces;
};

Outcome sort_pairs(const Experts& experts, const bf16* x, int64_t stride, int64_t P, const int64_t* ids, int64_t K,
                   Plan& plan) {
  std::vector<int32_t> places(P);
  plan.starts.assign(experts.E + 1, 0);
  plan.h_starts.assign(experts.E + 1, 0);
  plan.sorted.assign(P, -1);
  for (int64_t p = 0; p < P; ++p) {
    int64_t id = ids[p];
    if (id >= experts.num_ids) return kNoSuchExpert;
    if (id >= 0 && experts.expert_map) id = experts.expert_map[id];
    places[p] = id >= 0 ? experts.places[id] : -1;
    if (places[p] >= 0) ++plan.starts[places[p] + 1];
  }
  for (int64_t e = 0; e < experts.E; ++e) {
    plan.h_starts[e + 1] = plan.h_starts[e] + plan.starts[e + 1] * experts.widths[e];
    plan.starts[e + 1] += plan.starts[e];
  }
  plan.tokens.resize(plan.starts[experts.E]);
  std::vector<int64_t> next(plan.starts.begin(), plan.starts.end() - 1);
  for (int64_t p = 0; p < P; ++p) {
    if (places[p] < 0) continue;
    plan.sorted[p] = next[places[p]]++;
    plan.tokens[plan.sorted[p]] = x + p / K * stride;
  }
  return kDone;
}

void cut_pieces(const Experts& experts, int threads, Plan& plan) {
  const int64_t H = experts.H;
  int64_t active = 0;
  for (int64_t e = 0; e < experts.E; ++e) active += plan.starts[e + 1] > plan.starts[e];
  const int64_t row_step = std::clamp<int64_t>(kCache / (2 * H) / 16 * 16, 16, kMaxRows);
  const int64_t cuts = active ? (kPieces * threads + active - 1) / active : 1;  // of the columns, if tokens are few
  const int64_t whole_rows = std::max(kLeastColumns, (H / cuts + kLanes - 1) / kLanes * kLanes);
  for (int64_t e = 0; e < experts.E; ++e) {
    const int64_t pairs = plan.starts[e + 1] - plan.starts[e], width = experts.widths[e];
    const int64_t column_step = pairs > kBlock ? kLeastColumns : whole_rows;
    for (int64_t r = 0; pairs && r < width; r += row_step)
      plan.row_pieces.push_back({e, r, std::min(row_step, width - r)});
    for (int64_t c = 0; pairs && c < H; c += column_step)
      plan.column_pieces.push_back({e, c, std::min(column_step, H - c)});
  }
}

Outcome run_tokens(const Experts& experts, const bf16* x, int64_t stride, int64_t num_tokens, const float* weights,
                   const int64_t* ids, int64_t K, int threads, bf16* y) {
  Plan plan;
  if (sort_pairs(experts, x, stride, num_tokens * K, ids, K, plan) != kDone) return kNoSuchExpert;
  cut_pieces(experts, threads, plan);
  const std::vector<int64_t>&starts = plan.starts, &h_starts = plan.h_starts, &sorted = plan.sorted;
  const std::vector<Piece>&row_pieces = plan.row_pieces, &column_pieces = plan.column_pieces;
  const int64_t H = experts.H;
  const std::unique_ptr<bf16[]> h(new bf16[h_starts.back()]);
  const std::unique_ptr<float[]> terms(new float[starts.back() * H]);

#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < row_pieces.size(); ++i) {
      const int64_t e = row_pieces[i].place, r = row_pieces[i].start, width = experts.widths[e];
      const bf16* gate = experts.w13 + (experts.offsets[e] + r) * H;
      for (int64_t p = starts[e]; p < starts[e + 1]; p += kBlock)
        with_block(starts[e + 1] - p, [&](auto m) {
          hidden_activations<m()>(gate, gate + experts.S * H, plan.tokens.data() + p, H, row_pieces[i].count,
                                  h.get() + h_starts[e] + (p - starts[e]) * width + r, width);
        });
    }
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < column_pieces.size(); ++i) {
      const int64_t e = column_pieces[i].place, c = column_pieces[i].start, width = experts.widths[e];
      const int64_t columns = column_pieces[i].count, chunk = std::max<int64_t>(1, kCache / columns / kDownRows) * kDownRows;
      for (int64_t p = starts[e]; p < starts[e + 1]; ++p) memset(terms.get() + p * H + c, 0, columns * sizeof(float));
      for (int64_t begin = 0; begin < width; begin += chunk)
        for (int64_t p = starts[e]; p < starts[e + 1]; p += kBlock)
          with_block(starts[e + 1] - p, [&](auto m) {
            const bf16* activations = h.get() + h_starts[e] + (p - starts[e]) * width;
            for (int64_t r = begin; r < std::min(begin + chunk, width); r += kDownRows)
              add_rows<m()>(experts.w2 + (experts.offsets[e] + r) * H + c, H, columns, activations + r, width,
                            terms.get() + p * H + c);
          });
    }
    // back into the order of columns, see add_rows
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_tokens; ++t)
      for (int64_t i = 0; i < H; i += kLanes) {
        __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
        for (int64_t p = t * K; p < t * K + K; ++p) {
          if (sorted[p] < 0) continue;
          const float* term = terms.get() + sorted[p] * H + i;
          const __m512 weight = _mm512_set1_ps(weights[p]);
          low = _mm512_fmadd_ps(weight, _mm512_loadu_ps(term), low);
          high = _mm512_fmadd_ps(weight, _mm512_loadu_ps(term + 16), high);
        }
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(low, second, high),
                                                  _mm512_permutex2var_ps(low, first, high));
        _mm512_storeu_si512(y + t * H + i, (__m512i)both);
      }
  }
  return kDone;
}

}  // namespace

// y[t] = Σ_k weights[t, k] · expert ids[t, k] of x[t]. x: rows of H, `stride` apart; ids: -1 for none; y: [T, H]. The
// hidden activations are rounded to bfloat16 as they are in the model, all sums are float32, y is rounded once.
// Returns an Outcome; y is not whole unless it is kDone.
extern "C" int ragged_moe(const bf16* x, int64_t stride, int64_t T, int64_t H, const bf16* w13, const bf16* w2,
                          int64_t S, const int32_t* layout, int64_t E, const float* weights, const int64_t* ids,
                          int64_t K, const int32_t* expert_map, int64_t num_ids, int threads, bf16* y) {
  const Experts experts{w13, w2, S, H, E, layout, layout + E, layout + 2 * E, expert_map, num_ids};
  try {
    for (int64_t t = 0; t < T; t += kTokens) {
      const Outcome outcome = run_tokens(experts, x + t * stride, stride, std::min(kTokens, T - t), weights + t * K,
                                         ids + t * K, K, threads, y + t * H);
      if (outcome != kDone) return outcome;
    }
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
  return kDone;
}
