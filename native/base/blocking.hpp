// What a thread gives up before it waits: a caller that holds something which other threads need (Python's interpreter
// lock) keeps it as long as nothing waits, which is nearly always, and cannot keep it while a stopped rank holds a
// lock.
//
// Example: a thread of Python's submits a small tensor. Usually that takes a microsecond, less than giving the
// interpreter lock up and taking it back. But when the lock of the tensors' table is taken, the thread first calls
// about_to_block(), where the binding gives the interpreter lock up.
#pragma once

namespace kvstore_hvd {

// From its construction to its destruction, on one thread; nested ones are called from the innermost outwards.
class BlockingObserver {
 public:
  BlockingObserver();
  BlockingObserver(const BlockingObserver&) = delete;
  BlockingObserver& operator=(const BlockingObserver&) = delete;

  // The thread may now wait for others. May be called any number of times, and with locks of the engine held: it must
  // not block itself, and must not call the engine.
  virtual void about_to_block() noexcept = 0;

 protected:
  ~BlockingObserver();

 private:
  friend void about_to_block() noexcept;
  BlockingObserver* const outer_;
};

// To be called by whatever may sleep, or wait for a lock under which another thread may sleep.
void about_to_block() noexcept;

}  // namespace kvstore_hvd
