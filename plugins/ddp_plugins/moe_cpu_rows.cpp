// Routed experts of different widths over the packed rows, for processors with AVX-512 BF16; see moe_cpu_rows.py.
//
// Uses no header of torch or Python: moe_cpu_rows.py compiles this file and calls ragged_moe through ctypes.
// Letters: T tokens, H hidden size, K experts per token, E experts on this rank, S rows of all experts, P = T·K pairs
// of a token and one of its experts, w channels of an expert. A position is an expert's index in ExpertLayout.order.
//
// Pairs are sorted by expert. The first pass multiplies each row of gate and up by the tokens of its expert and stores
// hidden activations. The second adds rows of the transposed down projection, each times its hidden activation. The
// third sums over a token's experts. With few tokens the weights are read once, in order, at memory bandwidth; software
// prefetch and more concurrent streams were slower. The first pass is divided by rows and the second by columns, so one
// thread computes each sum in one order and the result does not depend on the number of threads.

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

constexpr int kBlock = 6;               // tokens that share a load of weights; sums of 4 rows x 6 fill the registers
constexpr int64_t kMaxRows = 64;        // rows of gate, and as many of up, per piece of work of the first pass
constexpr int64_t kCache = 1 << 18;     // weights per piece: half of a 1 MB second-level cache
constexpr int64_t kLeastColumns = 256;  // columns per piece of the second pass
constexpr int64_t kPieces = 4;          // pieces per thread, so that all threads finish at about the same time
constexpr int64_t kTokens = 1024;       // tokens per run; bounds the buffers
constexpr int64_t kLanes = 32;          // bfloat16 numbers per vector; H is a multiple
constexpr int kDownRows = 8;            // rows of the down projection that are added together; widths are multiples

inline __m512bh load(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

// out[m · kMaxRows] = w · x[m], one row at a time: for the few tokens of a decode step
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

// out[m · kMaxRows + r] = w[r] · x[m] for 4 rows, which reuses each loaded number
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

// e^x = 2^n · a Taylor polynomial of the remainder, at most ln(2)/2; 0 and infinity outside of the float range
inline __m512 exponential(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  const __m512 left = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147181f), x);
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, left, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(sum, n);
}

// h[m][r] = silu(gate[r] · x[m]) · (up[r] · x[m]) for `count` rows, a multiple of 16; the first product is at most
// `limit`, the second between -limit and limit
template <int M>
void hidden_activations(const bf16* gate, const bf16* up, const bf16* const* x, int64_t H, int64_t count, float limit,
                        bf16* h, int64_t width) {
  float g[M][kMaxRows], u[M][kMaxRows];
  dot_all<M>(gate, x, H, count, g[0]);
  dot_all<M>(up, x, H, count, u[0]);
  for (int m = 0; m < M; ++m)
    for (int64_t r = 0; r < count; r += 16) {
      const __m512 most = _mm512_set1_ps(limit);  // first: the minimum of it and NaN is NaN
      const __m512 value = _mm512_min_ps(most, _mm512_loadu_ps(g[m] + r));
      const __m512 clamped = _mm512_min_ps(most, _mm512_max_ps(_mm512_set1_ps(-limit), _mm512_loadu_ps(u[m] + r)));
      const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exponential(_mm512_sub_ps(_mm512_setzero_ps(), value)));
      const __m512 product = _mm512_mul_ps(_mm512_div_ps(value, below), clamped);
      _mm256_storeu_si256((__m256i*)(h + m * width + r), (__m256i)_mm512_cvtneps_pbh(product));
    }
}

// sums[m] += Σ_r h[m][r] · w[r] over kDownRows rows and `columns`. The bfloat16 instruction adds adjacent products,
// so two rows are interleaved: of 32 columns, the first 16 sums belong to columns 0-3, 8-11, 16-19, 24-27.
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

// Calls `run` with the number of tokens, at most kBlock, as a compile-time constant.
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

struct Piece {  // a piece of work on one expert: rows in the first pass, columns in the second
  int64_t position, start, count;
};

struct Experts {
  const bf16 *w13, *w2;  // [2, S, H] and [S, H]
  int64_t S, H, E;
  const int32_t *positions, *offsets, *widths;  // ExpertLayout.table
  const int32_t* expert_map;                 // or null
  int64_t num_ids;                           // upper bound of ids: the map's length, or E
  float limit;                               // of gate x and up x; infinite without one
};

enum Outcome { kDone, kOutOfMemory, kNoSuchExpert };

struct Plan {  // the pairs of each expert and the pieces of work of one run
  // position e has pairs starts[e]…starts[e + 1]; their hidden activations begin at h_starts[e]
  std::vector<int64_t> starts, h_starts;
  std::vector<int64_t> sorted;      // index of pair p in that order, -1 without an expert on this rank
  std::vector<const bf16*> tokens;  // token of each pair, in that order
  std::vector<Piece> row_pieces, column_pieces;
};

Outcome sort_pairs(const Experts& experts, const bf16* x, int64_t stride, int64_t P, const int64_t* ids, int64_t K,
                   Plan& plan) {
  std::vector<int32_t> positions(P);
  plan.starts.assign(experts.E + 1, 0);
  plan.h_starts.assign(experts.E + 1, 0);
  plan.sorted.assign(P, -1);
  for (int64_t p = 0; p < P; ++p) {
    int64_t id = ids[p];
    if (id >= experts.num_ids) return kNoSuchExpert;
    if (id >= 0 && experts.expert_map) id = experts.expert_map[id];
    positions[p] = id >= 0 ? experts.positions[id] : -1;
    if (positions[p] >= 0) ++plan.starts[positions[p] + 1];
  }
  for (int64_t e = 0; e < experts.E; ++e) {
    plan.h_starts[e + 1] = plan.h_starts[e] + plan.starts[e + 1] * experts.widths[e];
    plan.starts[e + 1] += plan.starts[e];
  }
  plan.tokens.resize(plan.starts[experts.E]);
  std::vector<int64_t> next(plan.starts.begin(), plan.starts.end() - 1);
  for (int64_t p = 0; p < P; ++p) {
    if (positions[p] < 0) continue;
    plan.sorted[p] = next[positions[p]]++;
    plan.tokens[plan.sorted[p]] = x + p / K * stride;
  }
  return kDone;
}

void cut_pieces(const Experts& experts, int threads, Plan& plan) {
  const int64_t H = experts.H;
  int64_t active = 0;
  for (int64_t e = 0; e < experts.E; ++e) active += plan.starts[e + 1] > plan.starts[e];
  const int64_t row_step = std::clamp<int64_t>(kCache / (2 * H) / 16 * 16, 16, kMaxRows);
  const int64_t cuts = active ? (kPieces * threads + active - 1) / active : 1;  // of the columns, with few tokens
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
      const int64_t e = row_pieces[i].position, r = row_pieces[i].start, width = experts.widths[e];
      const bf16* gate = experts.w13 + (experts.offsets[e] + r) * H;
      for (int64_t p = starts[e]; p < starts[e + 1]; p += kBlock)
        with_block(starts[e + 1] - p, [&](auto m) {
          hidden_activations<m()>(gate, gate + experts.S * H, plan.tokens.data() + p, H, row_pieces[i].count,
                                  experts.limit, h.get() + h_starts[e] + (p - starts[e]) * width + r, width);
        });
    }
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < column_pieces.size(); ++i) {
      const int64_t e = column_pieces[i].position, c = column_pieces[i].start, width = experts.widths[e];
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
    // restore the order of columns that add_rows interleaved
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

// y[t] = Σ_k weights[t, k] · expert ids[t, k] of x[t]. x: rows of H, `stride` apart; ids: -1 for none; y: [T, H].
// Hidden activations are rounded to bfloat16 as in the model, all sums are float32, and y is rounded once.
// Returns an Outcome; y is complete only for kDone.
extern "C" int ragged_moe(const bf16* x, int64_t stride, int64_t T, int64_t H, const bf16* w13, const bf16* w2,
                          int64_t S, const int32_t* layout, int64_t E, const float* weights, const int64_t* ids,
                          int64_t K, const int32_t* expert_map, int64_t num_ids, float limit, int threads,
                          bf16* y) {
  const Experts experts{w13, w2, S, H, E, layout, layout + E, layout + 2 * E, expert_map, num_ids, limit};
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
