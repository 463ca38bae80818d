# Faults that are planted into the kernels, one at a time; each must be caught. Whoever includes this file defines
#
#   kvhvd_mutation(NAME CAUGHT_BY FILE OLD NEW)
#
# OLD stands once in FILE, of native/cuda or of this folder, and is replaced by NEW. CAUGHT_BY: the cases of
# test_gpu_kernels that must fail then; or `order`, for test_gpu_order under ThreadSanitizer.

# ---- None: the programs succeed without a fault ----
kvhvd_mutation(nothing_in_schedules schedules ring.cuh [==[#pragma once]==] [==[#pragma once]==])
kvhvd_mutation(nothing_in_stops stops ring.cuh [==[#pragma once]==] [==[#pragma once]==])
kvhvd_mutation(nothing_in_order order ring.cuh [==[#pragma once]==] [==[#pragma once]==])

# ---- Flow control and meetings ----
kvhvd_mutation(ring_overruns_its_slots schedules ring.cuh
  [==[own.freed[channel], sent_ + 1 - kSlots]==] [==[own.freed[channel], sent_ + 1 - 2 * kSlots]==])
kvhvd_mutation(ring_flag_before_data schedules ring.cuh
  [==[block_sync();  // all threads' accesses are before the flags]==] "")
kvhvd_mutation(counters_do_not_wrap schedules layout.cuh
  [==[static_cast<i32>(load_acquire(&counter.value) - wanted) < 0]==] [==[load_acquire(&counter.value) < wanted]==])
kvhvd_mutation(meeting_before_data schedules layout.cuh
  [==[block_sync();  // the block's accesses are before what thread 0 does]==] "")
kvhvd_mutation(first_block_speaks_for_all schedules layout.cuh
  [==[shared.last = 0;]==] [==[shared.last = 1;]==])
kvhvd_mutation(arrivals_are_not_reset schedules layout.cuh
  [==[if (shared.last != 0) store_relaxed(&own.arrived.value, 0);]==] "")
kvhvd_mutation(meetings_have_one_number schedules direct.cuh
  [==[store_relaxed(&own.launches.value, launches + 1)]==] [==[store_relaxed(&own.launches.value, launches)]==])
kvhvd_mutation(twoshot_leaves_early schedules direct.cuh
  [==[if (!meet(world, launch, 2 * shared.launches + 2, kEnd, shared)) return;]==] "")
kvhvd_mutation(one_staging_buffer schedules direct.cuh
  [==[return world.staging[rank] + launch.staging_offset;]==] [==[return world.staging[rank] + 0 * launch.bytes;]==])

# ---- Values ----
kvhvd_mutation(another_order_of_ranks schedules direct.cuh
  [==[staging_of(world, launch, rank) + at;
    KVHVD_UNROLL]==]
  [==[staging_of(world, launch, ranks - rank) + at;
    KVHVD_UNROLL]==])
kvhvd_mutation(any_nan schedules elements.cuh
  [==[return bits_of(canonical(sum)); }
  static KVHVD_INLINE Sum resume(Raw raw) { return widen(raw); }
  static KVHVD_INLINE Raw suspend(Sum sum) { return bits_of(sum); }
};

struct Float64 :]==]
  [==[return bits_of(sum); }
  static KVHVD_INLINE Sum resume(Raw raw) { return widen(raw); }
  static KVHVD_INLINE Raw suspend(Sum sum) { return bits_of(sum); }
};

struct Float64 :]==])
kvhvd_mutation(tail_is_a_whole_vector schedules direct.cuh
  [==[static_cast<u32>(smaller(end - at, u64{kVectorBytes}))]==] [==[kVectorBytes]==])
kvhvd_mutation(ring_cuts_an_empty_chunk schedules ring.cuh
  [==[const bool cut = vectors != 0 && ]==] [==[const bool cut = ]==])

# ---- Stopping ----
kvhvd_mutation(abort_is_not_looked_at stops layout.cuh
  [==[if (load_relaxed(world.abort) != 0) {]==] [==[if (world.abort == nullptr) {]==])
kvhvd_mutation(no_time_limit stops layout.cuh
  [==[now - began > launch.timeout_ns]==] [==[now < began]==])
kvhvd_mutation(stops_alone stops layout.cuh
  [==[if (rank != world.rank) store_relaxed(&world.control[rank]->stop.value, word);]==] "")
kvhvd_mutation(stops_without_a_status stops layout.cuh
  [==[    store_relaxed(world.status, before);
]==] "")
kvhvd_mutation(waits_before_all_flags stops layout.cuh
  [==[    store_release(&world.control[rank]->met[world.rank].value, number);
  }]==]
  [==[    store_release(&world.control[rank]->met[world.rank].value, number);
    if (!wait_for(world, launch, own.met[rank], number, rank, place)) break;
  }]==])

# ---- Memory order ----
kvhvd_mutation(filled_relaxed order ring.cuh
  [==[store_release(&world_.control[next]->filled]==] [==[store_relaxed(&world_.control[next]->filled]==])
kvhvd_mutation(freed_relaxed order ring.cuh
  [==[store_release(&world_.control[previous]->freed]==] [==[store_relaxed(&world_.control[previous]->freed]==])
kvhvd_mutation(met_relaxed order layout.cuh
  [==[store_release(&world.control[rank]->met]==] [==[store_relaxed(&world.control[rank]->met]==])
kvhvd_mutation(wait_relaxed order layout.cuh
  [==[load_acquire(&counter.value)]==] [==[load_relaxed(&counter.value)]==])
kvhvd_mutation(arrival_relaxed order host/platform.hpp
  [==[__atomic_fetch_add(to, value, __ATOMIC_ACQ_REL)]==] [==[__atomic_fetch_add(to, value, __ATOMIC_RELAXED)]==])
kvhvd_mutation(ring_reads_before_waiting order ring.cuh
  [==[block_sync();  // what the neighbours did before their flags is before what any thread does now]==] "")
