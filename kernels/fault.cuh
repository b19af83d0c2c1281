// What a wait that gave up leaves behind: the 64 bytes of brigade-device's FaultRecord.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sync.cuh"

namespace brigade {

struct alignas(64) FaultRecord {
  uint32_t kind;
  uint32_t operation;
  uint32_t rank;
  uint32_t peer;
  uint32_t slot;
  uint32_t generation;
  uint64_t expected;
  uint64_t seen;
  uint64_t waited_ns;
  uint64_t call;
  uint32_t claimed;
  uint32_t reserved;
};
static_assert(sizeof(FaultRecord) == 64, "fault record");
static_assert(offsetof(FaultRecord, expected) == 24, "fault record");
static_assert(offsetof(FaultRecord, claimed) == 56, "fault record");

// States of `claimed`. The host reads the other fields only after it has seen `complete`.
constexpr uint32_t claim_free = 0, claim_taken = 1, claim_complete = 2;

// The first to give up writes the record; the others leave it alone. `record` lies in pinned host memory and belongs to one
// rank: only kernels on that rank's GPU claim it, so an atomic of this GPU's scope settles who was first.
__device__ inline bool record_fault(FaultRecord* record, FaultRecord what) {
  if (atomicCAS(&record->claimed, claim_free, claim_taken) != claim_free) return false;
  record->kind = what.kind;
  record->operation = what.operation;
  record->rank = what.rank;
  record->peer = what.peer;
  record->slot = what.slot;
  record->generation = what.generation;
  record->expected = what.expected;
  record->seen = what.seen;
  record->waited_ns = what.waited_ns;
  record->call = what.call;
  record->reserved = 0;
  store_release_sys(&record->claimed, claim_complete);
  return true;
}

}  // namespace brigade
