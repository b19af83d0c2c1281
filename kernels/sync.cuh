// Flags between ranks, and the one way to wait for them.
//
// A flag is 64 bits: generation 8 | signature 24 | epoch 32. The generation counts resets of the communicator, the signature
// is the hash of the call, and the epoch counts calls and only grows, wrapping: two epochs are compared by signed difference.
//
//   access                          why it is enough
//   st.release.sys / ld.acquire.sys a flag orders the data before it, for a peer on any GPU or the host
//   ld.relaxed.sys (abort word)     it only ends a wait; nothing that follows reads what another rank wrote
//
// The host's twin is the crate brigade-sync; the two are kept alike.
#pragma once
#include <cstdint>

namespace brigade {

struct Flag {
  uint32_t generation;  // 8 bits
  uint32_t signature;   // 24 bits
  uint32_t epoch;
};

__host__ __device__ constexpr uint64_t pack(Flag f) {
  return uint64_t(f.generation & 0xffu) << 56 | uint64_t(f.signature & 0xffffffu) << 32 | f.epoch;
}

__host__ __device__ constexpr Flag unpack(uint64_t word) {
  return {uint32_t(word >> 56), uint32_t(word >> 32) & 0xffffffu, uint32_t(word)};
}

static_assert(pack({0xab, 0x123456, 0xfedcba98u}) == 0xab123456fedcba98ull, "flag layout");
static_assert(unpack(0xab123456fedcba98ull).signature == 0x123456u, "flag layout");

__device__ __forceinline__ void store_release_sys(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ void store_release_sys(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_relaxed_sys(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t globaltimer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Nothing of an earlier kernel may be touched before this: every kernel calls it first, on every path, but for what it reads of memory that its caller
// says no kernel in front has written (few_rows.cu), or that only steps in front of it are in the way of (gemm_tiles.cuh). A kernel to which the one in front
// sends words that tell of themselves waits at its end (SentNorm of all_reduce_norm.cu), and so does a receive beside its send (in_turn.cuh): the one in front has let it
// begin behind its own wait.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may take its place beside this one; what it does there waits for the end of this one. Behind the wait above, so that all but this one, which is of
// the call in front, has ended when the next begins; tiles alone call it before, and stand behind steps of their own call, or behind the kernel that lays their adapters out and
// is launched behind the end of all in front of it; and so does the kernel to which a product of the same call sends.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Numbered as the fault kinds of brigade-device.
enum class Outcome : uint32_t { reached = 0, timeout = 1, mismatch = 2, aborted = 3 };

struct Waited {
  Outcome outcome;
  uint64_t seen;
  uint64_t waited_ns;
};

// What a wait is for. Exactly: the protocol keeps the peer from posting a later flag before this one was seen, so any other
// flag of this epoch or a later one is another call. At least: credits and arrivals at a reset, whatever their signature. Since:
// the same of this signature, where the protocol keeps the peer from another call before all of this one's flags were seen.
enum class Want { exactly, at_least, since };

// What a flag that was read means to a rank that waits for `expected`. Another generation's flag is not there yet.
enum class Progress { behind, there, other_call };

__host__ __device__ constexpr Progress progress(uint64_t seen, uint64_t expected, Want want) {
  const Flag s = unpack(seen), e = unpack(expected);
  if (s.generation != e.generation) return Progress::behind;
  const int32_t ahead = int32_t(s.epoch - e.epoch);
  if (ahead < 0) return Progress::behind;
  if (want == Want::at_least) return Progress::there;
  if (want == Want::since) return s.signature == e.signature ? Progress::there : Progress::other_call;
  return ahead == 0 && s.signature == e.signature ? Progress::there : Progress::other_call;
}

static_assert(progress(pack({1, 7, 5}), pack({1, 7, 5}), Want::exactly) == Progress::there, "equal");
static_assert(progress(pack({1, 7, 4}), pack({1, 7, 5}), Want::exactly) == Progress::behind, "earlier epoch");
static_assert(progress(pack({1, 7, 6}), pack({1, 7, 5}), Want::exactly) == Progress::other_call, "later epoch");
static_assert(progress(pack({1, 8, 5}), pack({1, 7, 5}), Want::exactly) == Progress::other_call, "other signature");
static_assert(progress(pack({2, 7, 5}), pack({1, 7, 5}), Want::exactly) == Progress::behind, "other generation");
static_assert(progress(pack({1, 9, 0}), pack({1, 7, 0xffffffffu}), Want::at_least) == Progress::there, "epochs wrap");
static_assert(progress(pack({1, 7, 9}), pack({1, 7, 5}), Want::since) == Progress::there, "later, same signature");
static_assert(progress(pack({1, 8, 9}), pack({1, 7, 5}), Want::since) == Progress::other_call, "later, other signature");
static_assert(progress(pack({1, 8, 4}), pack({1, 7, 5}), Want::since) == Progress::behind, "earlier, whatever it is");

// Waits until `flag` shows what is wanted, the abort word is set, or `timeout_ns` have passed. One thread calls it. Bounded:
// the clock and the abort word are read every 256 spins.
__device__ inline Waited wait_flag(const uint64_t* flag, uint64_t expected, Want want, const uint32_t* abort_word,
                                   uint64_t timeout_ns) {
  const uint64_t start_ns = globaltimer_ns();
  for (uint32_t spin = 0;; ++spin) {
    const uint64_t seen = load_acquire_sys(flag);
    const Progress p = progress(seen, expected, want);
    if (p != Progress::behind) {
      return {p == Progress::there ? Outcome::reached : Outcome::mismatch, seen, globaltimer_ns() - start_ns};
    }
    if (spin % 256 == 0) {
      const uint64_t waited_ns = globaltimer_ns() - start_ns;
      if (load_relaxed_sys(abort_word) != 0) return {Outcome::aborted, seen, waited_ns};
      if (waited_ns >= timeout_ns) return {Outcome::timeout, seen, waited_ns};
    }
  }
}

}  // namespace brigade
