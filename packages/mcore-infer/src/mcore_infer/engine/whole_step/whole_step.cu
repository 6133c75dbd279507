// One decoding step of all layers as one persistent kernel: one block for each multiprocessor.
//
// A layer has five phases: qkv, attention, projection, gate and up, down. After each phase all
// blocks synchronize at a counter in global memory. Weights do not depend on results. Some warps
// of each block therefore only copy the block's share of all weights, in the order of use, into a
// ring in shared memory. The copying warps skip the synchronization and run ahead of the computing
// warps by the length of the ring, across phases. Few stages are in flight at once: more stages
// would queue in the memory system, and reads between phases would wait behind them. Register
// spills would wait in the same queue, so the copying warps give registers to the computing warps.
// The computing warps multiply the ring's contents, sixteen rows of a weight at a time, on tensor
// cores with the rows of the input as the narrow side.
//
// Several GPUs (RANKS) split every weight: each runs this kernel for its heads and its part of F,
// and they exchange the partial sums of projection and down (see join). Sizes are those of a rank.
//
// whole_step.py defines the sizes: ROWS, D, F, HEADS, GROUPS, H, PAGE (tokens), SPLITS (of a
// row's keys, at most), STAGES (of the ring), CODES (whether weights are e4m3), TALL (outputs
// that share a scale; 0: all), DRAFTS (whether rows may be of one request), EPSILON, OFFSET (of
// norms' weights), SCALE (of scores), RANKS (that split the weights), BUFFERS (of partial
// sums) and TIMEOUT_CYCLES (clock cycles to wait for the other ranks).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // computing warps
constexpr int COPIERS = 4;                      // copying warps, four rows each
constexpr int IN_FLIGHT = CODES ? 2 : 3;        // stages in flight at once
constexpr int ITEM = CODES ? 1 : 2;
constexpr int SPAN = 1024, PITCH = SPAN + 64, STAGE = 16 * PITCH;  // bytes of a row, and of 16
constexpr int Q = HEADS * H, QKV = Q + 2 * GROUPS * H, PER = HEADS / GROUPS;
constexpr int WIDEST = F > D ? (F > Q ? F : Q) : (D > Q ? D : Q);
constexpr int INPUT_PITCH = 2 * WIDEST + 64, QUERY_PITCH = H + 8;
constexpr int PART = PER * (H + 2);  // values of a group's heads, each with its sum and maximum
constexpr float NOTHING = -1e30f;    // a maximum of no scores

struct Layer {
  const char* weights[4];  // qkv, projection, gate and up, down
  const float* scales[4];
  const bf16* norms[2];
  const bf16* head_norms[2];  // null: none
  const bf16* bias;           // of qkv; null: none
  bf16 *keys, *values;        // [pages, PAGE, GROUPS, H]
};

struct Step {
  const Layer* layers;
  bf16 *x, *qkv, *mixed, *between;    // [ROWS, D], changed; [ROWS, QKV]; [ROWS, Q]; [ROWS, F]
  float* parts;                       // [ROWS, GROUPS, SPLITS, PART]
  u32* counters;                      // zeros: of all blocks, then of [ROWS, GROUPS]
  const float *cos, *sin;             // [ROWS, H / 2]
  const long long *tables, *lengths;  // [ROWS, table_size], [ROWS]
  long long table_size, num_layers, rank;
  u32* exchanges;     // number of exchanges before this step, equal on all ranks; increased
  u64* inbox[RANKS];  // each rank's memory: [BUFFERS, RANKS, D / 16, 8, ROWS, 2]
};

// --- instructions -------------------------------------------------------------------------

#define DEVICE __device__ __forceinline__

// The driver prints the message, and the next CUDA call of the host raises an error.
extern "C" __device__ void __assertfail(const char* message, const char* file, u32 line,
                                        const char* function, size_t char_bytes);

DEVICE int thread() { return threadIdx.x; }  // signed, because signed sums take fewer registers
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void begin_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
DEVICE void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrive at the barrier when this thread's copies have completed.
DEVICE void arrive_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred p;\nagain:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}"
               ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void copy_in(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int MOST>
DEVICE void wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(MOST) : "memory");
}
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
DEVICE uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
// Load what other blocks wrote in this kernel, bypassing the L1 cache.
DEVICE uint4 fresh16(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE float2 fresh8(const float* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}
DEVICE float wide(bf16 v) { return __uint_as_float((u32)v << 16); }
DEVICE float fresh(const bf16* p) {
  bf16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return wide(v);
}
DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000); }
DEVICE bf16 narrow(float v) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
DEVICE u32 narrow(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// One instruction converts two e4m3 codes to float16. With codes, inputs are therefore float16,
// divided by 16.
constexpr float FACTOR = CODES ? 16 : 1;
DEVICE u32 as_input(float low, float high) {
  if (!CODES) return narrow(low, high);
  u32 r;
  low = fminf(fmaxf(low / FACTOR, -65504.f), 65504.f);
  high = fminf(fmaxf(high / FACTOR, -65504.f), 65504.f);
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE uint2 from_codes(u32 word) {
  uint2 r;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(r.x), "=r"(r.y) : "r"(word));
  return r;
}
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32."
DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (CODES)
    asm volatile(MMA "f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile(MMA "bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Of bfloat16 where the lower eight rows are nothing.
DEVICE void mma_upper(float* c, u32 a0, u32 a2, u32 b0, u32 b1) {
  asm volatile("{\n.reg .f32 d, e;\n" MMA
               "bf16.bf16.f32 {%0,%1,d,e}, {%2,%6,%3,%6}, {%4,%5}, {%0,%1,%7,%7};\n}"
               : "+f"(c[0]), "+f"(c[1])
               : "r"(a0), "r"(a2), "r"(b0), "r"(b1), "r"(0), "f"(0.0f));
}
DEVICE float sum_of_warp(float v) {
#pragma unroll
  for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

// Grid synchronization in two halves: writes before arrive_all are visible after wait_all.
DEVICE void arrive_all(u32* count) {
  meet();
  if (threadIdx.x == 0)
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
DEVICE void wait_all(u32* count, u32& passed) {
  u32 seen;
  if (threadIdx.x == 0) do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
    } while (seen < passed);
  passed += gridDim.x;
  meet();
}

// --- products -----------------------------------------------------------------------------

struct Ring {
  u32 stages, full, empty;  // addresses
  u32 slot, parity;
  DEVICE void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// Copy this block's tiles of a weight [N, K] into the ring, 16 rows each. For gate and up, which
// are stacked, a tile is eight rows of the gate and the same eight rows of up.
template <int N, int K, bool IS_PAIR>
__device__ void stream(Ring& ring, const char* weight) {
  const int lane = threadIdx.x % 32, first = 4 * (threadIdx.x / 32 - WARPS);
  const long long pitch = K * ITEM;
  for (int tile = blockIdx.x; tile < N / 16; tile += gridDim.x) {
    const int of_pair = tile * 8 + first % 8 + (first < 8 ? 0 : N / 2);
    const char* from = weight + (IS_PAIR ? of_pair : tile * 16 + first) * pitch + 16 * lane;
    for (int at = 0; at < K * ITEM; at += SPAN, from += SPAN) {
      wait(ring.empty + 8 * ring.slot, ring.parity ^ 1);
      const u32 to = ring.stages + ring.slot * STAGE + first * PITCH + 16 * lane;
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int b = 0; b < SPAN; b += 512)
          if (at + b + 16 * lane < K * ITEM) copy_in(to + i * PITCH + b, from + i * pitch + b);
      arrive_copied(ring.full + 8 * ring.slot);
      end_group(), wait_groups<IN_FLIGHT - 1>();
      ring.next();
    }
  }
}

// Multiply this block's tiles with the inputs. Sums of the rows ``row`` and ``row + 8`` of a
// tile for input ``m`` go to ``end(tile, row, m, sums, known)``; ``known`` is what
// ``begin(tile, row, m)`` read before, while the tile was on its way.
template <int N, int K, class Begin, class End>
DEVICE void multiply(Ring& ring, u32 inputs, float* sums, const Begin& begin, const End& end) {
  const int warp = thread() / 32, lane = thread() % 32, g = lane / 4, t = lane % 4;
  const int row = thread() / 8, m = thread() % 8;
  const bool ends = row < 8 && m < ROWS;
  const u32 mine = inputs + (g % ROWS) * INPUT_PITCH;
  for (int tile = blockIdx.x, turn = 0; tile < N / 16; tile += gridDim.x, turn ^= 1) {
    float4 known;
    if (ends) known = begin(tile, row, m);
    float c[2][4] = {};
    for (int at = 0; at < K * ITEM; at += SPAN) {
      wait(ring.full + 8 * ring.slot, ring.parity);
      const u32 base = ring.stages + ring.slot * STAGE + g * PITCH + 16 * t;
#pragma unroll
      for (int i = 0; i < SPAN; i += 64 * WARPS) {
        const int b = 64 * warp + i;
        if (at + b >= K * ITEM) break;
        // The sum runs over the inner index in any order, as long as weight and input agree: both
        // read 16 adjacent bytes, without the shuffles of the instruction's own layout.
        const uint4 a = load_shared(base + b), d = load_shared(base + b + 8 * PITCH);
        const u32 x = mine + (at + b + 16 * t) * (2 / ITEM);
        const uint4 e = load_shared(x);
        if (CODES) {
          const uint4 f = load_shared(x + 16);
          const u32 upper[4] = {a.x, a.y, a.z, a.w}, lower[4] = {d.x, d.y, d.z, d.w};
          const u32 given[8] = {e.x, e.y, e.z, e.w, f.x, f.y, f.z, f.w};
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const uint2 p = from_codes(upper[j]), q = from_codes(lower[j]);
            mma(c[j % 2], p.x, q.x, p.y, q.y, given[2 * j], given[2 * j + 1]);
          }
        } else {
          mma(c[0], a.x, d.x, a.y, d.y, e.x, e.y);
          mma(c[1], a.z, d.z, a.w, d.w, e.z, e.w);
        }
      }
      __syncwarp();
      if (lane == 0) arrive(ring.empty + 8 * ring.slot);
      ring.next();
    }
    float* own = sums + turn * WARPS * 128;
    float* at = own + warp * 128 + g * 8 + 2 * t;
    at[0] = c[0][0] + c[1][0], at[1] = c[0][1] + c[1][1];
    at[64] = c[0][2] + c[1][2], at[65] = c[0][3] + c[1][3];
    meet();
    if (ends) {
      float2 sum = {0, 0};
#pragma unroll
      for (int w = 0; w < WARPS; w++)
        sum.x += own[w * 128 + thread()], sum.y += own[w * 128 + 64 + thread()];
      end(tile, row, m, make_float2(sum.x * FACTOR, sum.y * FACTOR), known);
    }
  }
}

// Wait for all blocks, then copy rows into shared memory. Blocks start at different offsets, so
// that they do not read the same address at once.
template <int K>
DEVICE void read_inputs(const Step& step, u32& passed, char* inputs, const bf16* x) {
  constexpr int COUNT = ROWS * K / 8, BATCH = 8;
  wait_all(step.counters, passed);
  for (int begin = 0; begin < COUNT; begin += BATCH * THREADS) {
    uint4 held[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = begin + j * THREADS + thread();
      if (i < COUNT) held[j] = fresh16(x + (i + 32 * blockIdx.x) % COUNT * 8);
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = begin + j * THREADS + thread(), at = (i + 32 * blockIdx.x) % COUNT * 8;
      u32* pair = (u32*)&held[j];
#pragma unroll
      for (int k = 0; CODES && k < 4; k++) pair[k] = as_input(low(pair[k]), high(pair[k]));
      if (i < COUNT) *(uint4*)(inputs + at / K * INPUT_PITCH + 2 * (at % K)) = held[j];
    }
  }
  meet();
}

// The same with RMSNorm applied: rows of the residual stream over their root mean square, times
// the norm's weight.
DEVICE void read_normed(const Step& step, u32& passed, char* inputs, const bf16* norm,
                        float* scratch) {
  constexpr int TURNS = (D / 8 + THREADS - 1) / THREADS;
  uint4 held[ROWS][TURNS], factors[TURNS];
#pragma unroll
  for (int j = 0; j < TURNS; j++)
    if (const int i = j * THREADS + thread(); i < D / 8)
      factors[j] = *(const uint4*)(norm + (i + 32 * blockIdx.x) % (D / 8) * 8);
  wait_all(step.counters, passed);
#pragma unroll
  for (int m = 0; m < ROWS; m++)
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
      const int i = j * THREADS + thread();
      held[m][j] = make_uint4(0, 0, 0, 0);
      if (i < D / 8) held[m][j] = fresh16(step.x + m * D + (i + 32 * blockIdx.x) % (D / 8) * 8);
    }
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    float squares = 0;
#pragma unroll
    for (int j = 0; j < 4 * TURNS; j++) {
      const u32 pair = ((const u32*)&held[m][j / 4])[j % 4];
      squares += low(pair) * low(pair) + high(pair) * high(pair);
    }
    squares = sum_of_warp(squares);
    if (thread() % 32 == 0) scratch[m * WARPS + thread() / 32] = squares;
  }
  meet();
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += scratch[m * WARPS + w];
    const float factor = rsqrtf(total / D + EPSILON);
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
      const int i = j * THREADS + thread();
      u32* pair = (u32*)&held[m][j];
      const u32* by = (const u32*)&factors[j];
#pragma unroll
      for (int k = 0; k < 4; k++)
        pair[k] = as_input(low(pair[k]) * factor * (low(by[k]) + OFFSET),
                           high(pair[k]) * factor * (high(by[k]) + OFFSET));
      const int at = (i + 32 * blockIdx.x) % (D / 8) * 16;
      if (i < D / 8) *(uint4*)(inputs + m * INPUT_PITCH + at) = held[m][j];
    }
  }
  meet();
}

// --- attention ----------------------------------------------------------------------------

struct Share {  // of a row's keys: one split for the heads of one group
  int m, group, split, splits, begin, end;
  const long long* table;
  DEVICE Share(const Step& step, int item) {
    const int length = step.lengths[item % ROWS], chunks = (length + 15) / 16;
    m = item % ROWS, group = item / ROWS % GROUPS, split = item / (ROWS * GROUPS);
    splits = min(SPLITS, (length + 255) / 256);
    begin = split * chunks / splits * 16;
    end = split < splits ? min(length, (split + 1) * chunks / splits * 16) : begin;
    table = step.tables + m * step.table_size;
  }
  DEVICE long long place(int key) const {  // in the memory of all pages
    return ((table[key / PAGE] * PAGE + key % PAGE) * GROUPS + group) * H;
  }
};

// Apply norm and rotary embedding to one head; run by one warp.
__device__ void turn_head(const Step& step, int m, const bf16* head, const bf16* norm, bf16* to) {
  float a[H / 64], b[H / 64], squares = 0;
  const int lane = thread() % 32;
#pragma unroll
  for (int j = 0; j < H / 64; j++)
    a[j] = fresh(head + lane + 32 * j), b[j] = fresh(head + lane + 32 * j + H / 2);
#pragma unroll
  for (int j = 0; j < H / 64; j++) squares += a[j] * a[j] + b[j] * b[j];
  const float factor = norm ? rsqrtf(sum_of_warp(squares) / H + EPSILON) : 1;
#pragma unroll
  for (int j = 0; j < H / 64; j++) {
    const int i = lane + 32 * j;
    const float cos = step.cos[m * (H / 2) + i], sin = step.sin[m * (H / 2) + i];
    if (norm) a[j] *= factor * (wide(norm[i]) + OFFSET);
    if (norm) b[j] *= factor * (wide(norm[i + H / 2]) + OFFSET);
    to[i] = narrow(a[j] * cos - b[j] * sin), to[i + H / 2] = narrow(b[j] * cos + a[j] * sin);
  }
}

// Write the new key of a row, with norm and rotation, and its value to the cache.
__device__ void write_key(const Step& step, const Layer& layer, const Share& share) {
  const int warp = thread() / 32, lane = thread() % 32;
  const long long place = share.place(step.lengths[share.m] - 1);
  const bf16* row = step.qkv + share.m * QKV + Q + share.group * H;
  if (warp == WARPS - 1)
    turn_head(step, share.m, row, layer.head_norms[1], layer.keys + place);
  if (warp == WARPS - 2 && lane < H / 8)
    *(uint4*)(layer.values + place + 8 * lane) = fresh16(row + GROUPS * H + 8 * lane);
}

struct Mix {  // of one warp's keys; heads are rows g, channels lie as attend_split stores them
  float values[H / 8][2] = {}, top = NOTHING, total = 0;
};

// Attend to 16 keys from ``start`` on.
DEVICE void attend(const Layer& layer, const Share& share, int start, const uint4* query,
                   Mix& mix) {
  const int lane = thread() % 32, g = lane / 4, t = lane % 4;
  long long place[2];
  uint4 keys[2][H / 32], values[4][H / 64];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    place[i] = share.place(min(start + 8 * i + g, share.end - 1));
#pragma unroll
    for (int j = 0; j < H / 32; j++) keys[i][j] = fresh16(layer.keys + place[i] + 32 * j + 8 * t);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {  // keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9
    const long long from = __shfl_sync(~0u, place[i / 2], 4 * (2 * t + i % 2));
#pragma unroll
    for (int j = 0; j < H / 64; j++) values[i][j] = fresh16(layer.values + from + 64 * j + 8 * g);
  }
  float scores[2][2] = {}, top = mix.top;
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int j = 0; j < H / 32; j++) {
      mma_upper(scores[i], query[j].x, query[j].y, keys[i][j].x, keys[i][j].y);
      mma_upper(scores[i], query[j].z, query[j].w, keys[i][j].z, keys[i][j].w);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const bool is_seen = start + 8 * i + 2 * t + j < share.end;
      scores[i][j] = is_seen ? scores[i][j] * (SCALE * 1.4426950408889634f) : NOTHING;
      top = fmaxf(top, scores[i][j]);
    }
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float shrink = exp2f(mix.top - top);
  mix.top = top, mix.total *= shrink;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    scores[i / 2][i % 2] = exp2f(scores[i / 2][i % 2] - top);
    mix.total += scores[i / 2][i % 2];
  }
  const u32 a0 = narrow(scores[0][0], scores[0][1]), a2 = narrow(scores[1][0], scores[1][1]);
#pragma unroll
  for (int j = 0; j < H / 8; j++) {
    const u32 which = j % 2 ? 0x7632 : 0x5410;
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = ((const u32*)&values[i][j / 8])[j % 8 / 2];
    mix.values[j][0] *= shrink, mix.values[j][1] *= shrink;
    mma_upper(mix.values[j], a0, a2, __byte_perm(word[0], word[1], which),
              __byte_perm(word[2], word[3], which));
  }
}

// Join ``count`` parts of two outputs; ``total`` becomes the sum and maximum of the weights.
template <int MOST, bool IS_FRESH>
DEVICE float2 joined(const float* parts, int count, int output, float2& total) {
  const float* at = parts + output / H * (H + 2);
  float2 values[MOST], totals[MOST], sum = {0, 0};
  total = {0, NOTHING};
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const float *value = at + i * PART + output % H, *end = at + i * PART + H;
    values[i] = {0, 0}, totals[i] = {0, NOTHING};
    if (i < count) values[i] = IS_FRESH ? fresh8(value) : *(const float2*)value;
    if (i < count) totals[i] = IS_FRESH ? fresh8(end) : *(const float2*)end;
  }
#pragma unroll
  for (int i = 0; i < MOST; i++) total.y = fmaxf(total.y, totals[i].y);
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const float weight = exp2f(totals[i].y - total.y);
    sum.x += weight * values[i].x, sum.y += weight * values[i].y;
    total.x += weight * totals[i].x;
  }
  return sum;
}

// Attend to a share of the keys. The last share of a row and group to finish joins all of them.
__device__ void attend_split(const Step& step, const Layer& layer, const Share& share,
                             char* memory) {
  const int warp = thread() / 32, lane = thread() % 32, g = lane / 4, t = lane % 4;
  bf16* queries = (bf16*)memory;
  float* own = (float*)(memory + 16 * QUERY_PITCH);
  const bf16* row = step.qkv + share.m * QKV + share.group * PER * H;
  for (int head = warp; head < PER; head += WARPS)
    turn_head(step, share.m, row + head * H, layer.head_norms[0], queries + head * QUERY_PITCH);
  if (!DRAFTS && share.split == share.splits - 1) write_key(step, layer, share);
  meet();
  uint4 query[H / 32];
#pragma unroll
  for (int j = 0; j < H / 32; j++)
    query[j] = *(const uint4*)(queries + (g % PER) * QUERY_PITCH + 32 * j + 8 * t);
  Mix mix;
  for (int start = share.begin + 16 * warp; start < share.end; start += 16 * WARPS)
    attend(layer, share, start, query, mix);
  mix.total += __shfl_xor_sync(~0u, mix.total, 1);
  mix.total += __shfl_xor_sync(~0u, mix.total, 2);
  if (g < PER) {
    float* part = own + warp * PART + g * (H + 2);
#pragma unroll
    for (int j = 0; j < H / 8; j++) {
      part[j / 8 * 64 + 16 * t + j % 8] = mix.values[j][0];
      part[j / 8 * 64 + 16 * t + 8 + j % 8] = mix.values[j][1];
    }
    if (t == 0) part[H] = mix.total, part[H + 1] = mix.top;
  }
  meet();
  const int place = share.m * GROUPS + share.group;
  float *parts = step.parts + place * SPLITS * PART, *part = parts + share.split * PART;
  u32* mixed = (u32*)(step.mixed + share.m * Q + share.group * PER * H);
  float2 total;
  for (int i = 2 * thread(); i < PER * H; i += 2 * THREADS) {
    const float2 sum = joined<WARPS, false>(own, WARPS, i, total);
    if (share.splits == 1) mixed[i / 2] = narrow(sum.x / total.x, sum.y / total.x);
    if (share.splits == 1) continue;
    *(float2*)(part + i / H * (H + 2) + i % H) = sum;
    if (i % H == 0) *(float2*)(part + i / H * (H + 2) + H) = total;
  }
  if (share.splits == 1) return meet();
  meet();
  u32 *ended = (u32*)memory, *count = step.counters + 1 + place;
  if (thread() == 0) {
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(*ended) : "l"(count)
                 : "memory");
    if (*ended == share.splits - 1) *count = 0;
  }
  meet();
  if (*ended == share.splits - 1)
    for (int i = 2 * thread(); i < PER * H; i += 2 * THREADS) {
      const float2 sum = joined<SPLITS, true>(parts, share.splits, i, total);
      mixed[i / 2] = narrow(sum.x / total.x, sum.y / total.x);
    }
  meet();
}

DEVICE void attention(const Step& step, const Layer& layer, char* memory, u32& passed) {
  constexpr int ITEMS = ROWS * GROUPS * SPLITS, LINE = 64;
  // Prefetch keys and values into L2 while other blocks finish the qkv phase.
  for (int item = blockIdx.x; item < ITEMS; item += gridDim.x) {
    const Share share(step, item);
    for (int i = thread(); i < (share.end - share.begin) * (H / LINE); i += THREADS) {
      const long long at = share.place(share.begin + i / (H / LINE)) + i % (H / LINE) * LINE;
      prefetch(layer.keys + at), prefetch(layer.values + at);
    }
  }
  wait_all(step.counters, passed);
  if (DRAFTS) {  // rows of one request attend to each other's new keys: write all first
    for (int item = blockIdx.x; item < ROWS * GROUPS; item += gridDim.x)
      write_key(step, layer, Share(step, item));
    arrive_all(step.counters);
    wait_all(step.counters, passed);
  }
  for (int item = blockIdx.x; item < ITEMS; item += gridDim.x) {
    const Share share(step, item);
    if (share.split < share.splits) attend_split(step, layer, share, memory);
  }
  arrive_all(step.counters);
}

// --- the step -----------------------------------------------------------------------------

// Scales of the rows ``n`` and ``other`` of a weight.
DEVICE float2 factors(const float* scales, int n, int other) {
  if (!CODES) return {1, 1};
  return {scales[TALL ? n / max(1, TALL) : 0], scales[TALL ? other / max(1, TALL) : 0]};
}

// A partial sum (low 32 bits) and the number of its exchange (high 32 bits) are one word, which is
// written and read atomically. So no flag and no fence are needed (as in NCCL's protocol LL).
DEVICE void send(u64* to, u32 exchange, float2 sum) {
  const u64 stamp = (u64)exchange << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};"
               ::"l"(to), "l"(stamp | __float_as_uint(sum.x)), "l"(stamp | __float_as_uint(sum.y))
               : "memory");
}
// Wait for the partial sums of all ranks, ``stride`` words apart; add them in the order of ranks.
DEVICE float2 receive(const u64* from, int stride, u32 exchange) {
  u64 words[RANKS][2];
  const long long begin = clock64();
  for (bool is_complete = false; !is_complete;) {
    is_complete = true;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];"
                   : "=l"(words[r][0]), "=l"(words[r][1]) : "l"(from + r * stride) : "memory");
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      is_complete &= words[r][0] >> 32 == exchange && words[r][1] >> 32 == exchange;
    // One thread times out before the others and ends the kernel, so that usually one line is
    // printed.
    if (!is_complete && clock64() - begin > TIMEOUT_CYCLES * (thread() || blockIdx.x ? 2 : 1))
      __assertfail("partial sums of another tensor rank arrive", "whole_step.cu", __LINE__,
                   "receive", 1);
  }
  float2 sum = {0, 0};
#pragma unroll
  for (int r = 0; r < RANKS; r++)
    sum.x += __uint_as_float((u32)words[r][0]), sum.y += __uint_as_float((u32)words[r][1]);
  return sum;
}

// Multiply, add the partial sums of all ranks, and add the result to the residual stream, which is
// equal on all ranks. A block exchanges its tiles with the same block of the other ranks only.
// Exchanges alternate between two buffers. No sum is overwritten before it is read: a rank writes
// exchange n + 2 after it has received exchange n + 1 from all ranks, and each of them had read
// exchange n before it sent exchange n + 1.
template <int K>
DEVICE void join_ranks(const Step& step, const float* scales, Ring& ring, u32 given, float* sums,
                       u32 exchange) {
  constexpr int OF_RANK = D * ROWS;  // words of one rank in an exchange
  const int buffer = exchange % BUFFERS * RANKS * OF_RANK;
  const auto place = [&](int tile, int row, int m) { return 2 * ((tile * 8 + row) * ROWS + m); };
  const auto begin = [&](int tile, int row, int) {
    const float2 by = factors(scales, tile * 16 + row, tile * 16 + row + 8);
    return make_float4(by.x, by.y, 0, 0);
  };
  const auto end = [&](int tile, int row, int m, float2 sum, float4 known) {
    const int at = buffer + step.rank * OF_RANK + place(tile, row, m);
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      send(step.inbox[r] + at, exchange, make_float2(sum.x * known.x, sum.y * known.y));
  };
  multiply<D, K>(ring, given, sums, begin, end);
  // Threads receive four tiles of this block at once, 64 threads for each: 8 rows x 8 inputs.
  const u64* inbox = step.inbox[0];
#pragma unroll
  for (int r = 1; r < RANKS; r++) inbox = step.rank == r ? step.inbox[r] : inbox;
  const int row = thread() % 64 / 8, m = thread() % 8;
  for (int i = thread() / 64;; i += THREADS / 64) {
    const int tile = blockIdx.x + i * gridDim.x;
    if (tile >= D / 16 || m >= ROWS) break;
    bf16* x = step.x + m * D + tile * 16 + row;
    const float known[2] = {fresh(x), fresh(x + 8)};
    const float2 sum = receive(inbox + buffer + place(tile, row, m), OF_RANK, exchange);
    x[0] = narrow(known[0] + wide(narrow(sum.x)));
    x[8] = narrow(known[1] + wide(narrow(sum.y)));
  }
  arrive_all(step.counters);
}

// Multiply and add to the residual stream.
template <int K>
DEVICE void join(const Step& step, const float* scales, Ring& ring, u32 given, float* sums,
                 u32& exchange) {
  if constexpr (RANKS > 1) return join_ranks<K>(step, scales, ring, given, sums, ++exchange);
  const auto begin = [&](int tile, int row, int m) {
    const int n = tile * 16 + row;
    const float2 by = factors(scales, n, n + 8);
    const bf16* x = step.x + m * D + n;
    return make_float4(by.x, by.y, fresh(x), fresh(x + 8));
  };
  const auto end = [&](int tile, int row, int m, float2 sum, float4 known) {
    bf16* x = step.x + m * D + tile * 16 + row;
    x[0] = narrow(known.z + wide(narrow(sum.x * known.x)));
    x[8] = narrow(known.w + wide(narrow(sum.y * known.y)));
  };
  multiply<D, K>(ring, given, sums, begin, end);
  arrive_all(step.counters);
}

DEVICE void multiply_qkv(const Step& step, const Layer& layer, Ring& ring, u32 given,
                         float* sums) {
  const auto begin = [&](int tile, int row, int) {
    const int n = tile * 16 + row;
    const float2 by = factors(layer.scales[0], n, n + 8);
    if (!layer.bias) return make_float4(by.x, by.y, 0, 0);
    return make_float4(by.x, by.y, wide(layer.bias[n]), wide(layer.bias[n + 8]));
  };
  const auto end = [&](int tile, int row, int m, float2 sum, float4 known) {
    bf16* to = step.qkv + m * QKV + tile * 16 + row;
    to[0] = narrow(sum.x * known.x + known.z), to[8] = narrow(sum.y * known.y + known.w);
  };
  multiply<QKV, D>(ring, given, sums, begin, end);
  arrive_all(step.counters);
}

DEVICE void multiply_gate_up(const Step& step, const Layer& layer, Ring& ring, u32 given,
                             float* sums) {
  const auto begin = [&](int tile, int row, int) {
    const float2 by = factors(layer.scales[2], tile * 8 + row, F + tile * 8 + row);
    return make_float4(by.x, by.y, 0, 0);
  };
  const auto end = [&](int tile, int row, int m, float2 sum, float4 known) {
    const float gate = wide(narrow(sum.x * known.x)), up = wide(narrow(sum.y * known.y));
    step.between[m * F + tile * 8 + row] = narrow(gate / (1 + __expf(-gate)) * up);
  };
  multiply<2 * F, D>(ring, given, sums, begin, end);
  arrive_all(step.counters);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * COPIERS, 1)
whole_step(const Step step) {
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ float scratch[ROWS * WARPS];
  float* sums = (float*)(shared + STAGES * STAGE);
  char* inputs = (char*)(sums + 2 * WARPS * 128);
  Ring ring = {shared_address(shared), shared_address(barriers),
               shared_address(barriers + STAGES), 0, 0};
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES; i++)
      begin_barrier(ring.full + 8 * i, 32 * COPIERS), begin_barrier(ring.empty + 8 * i, WARPS);
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    for (int l = 0; l < step.num_layers; l++) {
      const Layer& layer = step.layers[l];
      stream<QKV, D, false>(ring, layer.weights[0]);
      stream<D, Q, false>(ring, layer.weights[1]);
      stream<2 * F, D, true>(ring, layer.weights[2]);
      stream<D, F, false>(ring, layer.weights[3]);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const u32 given = shared_address(inputs);
  u32 passed = 0, exchange = RANKS > 1 ? *step.exchanges : 0;
  for (int l = 0; l < step.num_layers; l++) {
    const Layer& layer = step.layers[l];
    read_normed(step, passed, inputs, layer.norms[0], scratch);
    multiply_qkv(step, layer, ring, given, sums);
    attention(step, layer, inputs, passed);
    read_inputs<Q>(step, passed, inputs, step.mixed);
    join<Q>(step, layer.scales[1], ring, given, sums, exchange);
    read_normed(step, passed, inputs, layer.norms[1], scratch);
    multiply_gate_up(step, layer, ring, given, sums);
    read_inputs<F>(step, passed, inputs, step.between);
    join<F>(step, layer.scales[3], ring, given, sums, exchange);
  }
  // All blocks have read the old number before they first waited for each other.
  if (RANKS > 1 && blockIdx.x == 0 && thread() == 0) *step.exchanges = exchange;
}
