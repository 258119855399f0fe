// A barrier over the peers' headers, with what a rank publishes copied before it.
// Built and called by native.py; python_barrier.py does the same.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// The first bytes of every rank's memory; header.py has the same offsets. The owner alone writes
// the first cache line, its peers the other: 128 bytes apart, since lines are fetched in pairs.
struct Header {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> state;
  std::atomic<uint64_t> word[2];
  char apart[104];
  std::atomic<uint32_t> sleepers;
};
static_assert(offsetof(Header, sleepers) == 128);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

long futex(std::atomic<uint32_t>* at, int op, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, at, op, value, limit, nullptr, 0);
}

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Counts wrap around: their difference says which is later.
bool here(const Header* peer, uint32_t number) {
  return static_cast<int32_t>(peer->arrived.load(std::memory_order_acquire) - number) >= 0;
}

// Sleeping costs a few system calls, a spin costs a core: `spin` ns of it, then sleep.
bool wait_for(Header* peer, uint32_t number, int64_t spin, int64_t until) {
  if (here(peer, number)) return true;
  if (spin > 0) {
    const int64_t end = now() + spin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (here(peer, number)) return true;
        relax();
      }
      sched_yield();  // the peer may wait for this very processor
    } while (now() < end);
  }
  // Either the owner sees a sleeper after it has arrived, or the sleeper sees that it has: both
  // write, then read, in one order that all agree on.
  peer->sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool there = false;
  for (;;) {
    const uint32_t seen = peer->arrived.load(std::memory_order_seq_cst);
    there = static_cast<int32_t>(seen - number) >= 0;
    const int64_t left = until - now();
    if (there || left <= 0) break;
    const timespec limit{left / INT64_C(1000000000), left % INT64_C(1000000000)};
    futex(&peer->arrived, FUTEX_WAIT, seen, &limit);
  }
  peer->sleepers.fetch_sub(1, std::memory_order_relaxed);
  return there;
}

}  // namespace

extern "C" {

// -1 once all ranks have arrived at barrier `number` with this rank's word; the first that has
// not after `limit` ns; or `size` plus the first whose word is another.
int fxboundary_wait(Header* const* headers, int size, int rank, uint32_t number, int64_t spin,
                    int64_t limit) {
  const int64_t until = now() + limit;
  for (int i = 0; i < size; ++i) {
    if (i != rank && !wait_for(headers[i], number, spin, until)) return i;
  }
  const uint64_t word = headers[rank]->word[number & 1].load(std::memory_order_relaxed);
  for (int i = 0; i < size; ++i) {
    if (headers[i]->word[number & 1].load(std::memory_order_relaxed) != word) return size + i;
  }
  return -1;
}

int fxboundary_arrive(Header* const* headers, int size, int rank, uint32_t number, uint64_t word,
                      void* to, const void* from, uint64_t nbytes, int64_t spin, int64_t limit) {
  Header* own = headers[rank];
  if (nbytes != 0) memcpy(to, from, nbytes);
  own->word[number & 1].store(word, std::memory_order_relaxed);
  own->arrived.store(number, std::memory_order_seq_cst);  // releases the copy and the word
  if (own->sleepers.load(std::memory_order_seq_cst) != 0) {
    futex(&own->arrived, FUTEX_WAKE, INT_MAX, nullptr);
  }
  return fxboundary_wait(headers, size, rank, number, spin, limit);
}

}  // extern "C"
