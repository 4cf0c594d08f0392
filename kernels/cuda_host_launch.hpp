// The entry points of a module: one launch, guarded by signals and a time limit. Included by cuda_host_runtime.cpp only.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <csetjmp>
#include <csignal>
#include <ctime>

#include "cuda_host_scheduler.hpp"

namespace cuda_host {

static sigjmp_buf on_signal;
static volatile sig_atomic_t in_kernel;
static long kernel_thread;  // the operating system's thread that runs the launch
static timer_t timer;       // of the time limit

// A signal inside a kernel (stack overflow, an unchecked access, __builtin_trap, the time limit) ends the launch, not the
// process. The time limit is a signal too, because a loop without a memory access passes no other check.
constexpr int kNumSignals = 6;
static int signals[kNumSignals] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, 0};
static struct sigaction previous[kNumSignals];

// Signals this thread after `seconds`.
static void start_timer(double seconds) {
  itimerspec when = {};
  when.it_value.tv_sec = static_cast<time_t>(seconds);
  when.it_value.tv_nsec = 1 + static_cast<long>((seconds - static_cast<double>(when.it_value.tv_sec)) * 999999998);
  timer_settime(timer, 0, &when, nullptr);
}

static bool make_timer() {
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = signals[kNumSignals - 1];
#ifdef sigev_notify_thread_id
  event.sigev_notify_thread_id = static_cast<pid_t>(kernel_thread);
#else
  event._sigev_un._tid = static_cast<pid_t>(kernel_thread);
#endif
  return timer_create(CLOCK_MONOTONIC, &event, &timer) == 0;
}

static void handle_signal(int number, siginfo_t* info, void*) {
  const bool timeout = number == signals[kNumSignals - 1];
  if (!in_kernel || syscall(SYS_gettid) != kernel_thread) {  // not ours: hand it to whoever was there before
    for (int i = 0; i < kNumSignals - 1; ++i)
      if (signals[i] == number) sigaction(number, &previous[i], nullptr);
    return;
  }
  if (timeout && unstoppable) {
    start_timer(0.001);
    return;
  }
  fault.kind = timeout ? kTimeout : kSignal, fault.index = number;
  fault.address = timeout ? 0 : reinterpret_cast<uint64_t>(info->si_addr);
  memcpy(fault.block, block_index, sizeof block_index);
  if (current != nullptr) memcpy(fault.thread, current->index, sizeof fault.thread);
  const uint64_t guard = stack_lo - kGuardBytes;
  if (fault.address - guard < kGuardBytes) set_text(fault.message, sizeof fault.message, "stack overflow of one thread");
  in_kernel = 0;
  siglongjmp(on_signal, 1);
}

static void run_guarded() {
  alignas(16) static char signal_stack[64 * 1024];
  signals[kNumSignals - 1] = SIGRTMAX - 3;
  stack_t ours = {}, theirs = {};
  ours.ss_sp = signal_stack, ours.ss_size = sizeof signal_stack;
  sigaltstack(&ours, &theirs);
  struct sigaction action = {};
  action.sa_sigaction = handle_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < kNumSignals; ++i) sigaction(signals[i], &action, &previous[i]);
  kernel_thread = syscall(SYS_gettid);
  const bool timed = make_timer();
  if (timed) start_timer(launch->time_limit);
  if (sigsetjmp(on_signal, 1) == 0) {
    in_kernel = 1;
    run_grid();
  }
  in_kernel = 0;
  if (timed) timer_delete(timer);
  for (int i = 0; i < kNumSignals; ++i) sigaction(signals[i], &previous[i], nullptr);
  sigaltstack(&theirs, nullptr);
}

}  // namespace cuda_host

extern "C" __attribute__((visibility("default"))) uint64_t cuda_host_static_shared() {
  return cuda_host::static_shared_bytes();
}

// Runs one launch; returns null, or why it was abandoned.
extern "C" __attribute__((visibility("default"))) const cuda_host::Fault* cuda_host_launch(const cuda_host::Launch* request) {
  using namespace cuda_host;
  memset(&fault, 0, sizeof fault);
  launch = request;
  num_threads = static_cast<int>(launch->block[0] * launch->block[1] * launch->block[2]);
  current = nullptr;
  memcpy(cuda_host_coordinates.block_dim, launch->block, sizeof launch->block);
  memcpy(cuda_host_coordinates.grid_dim, launch->grid, sizeof launch->grid);
  set_views(*launch);
  if (stacks.reset()) {
    stack_bytes = kStackBytes;
    recording = launch->trace != nullptr;
    unstoppable = 0;
    if (recording) recorder.begin(*launch);
    run_guarded();
    if (recording) recorder.report_unwritten();
    recording = false;
    stack_lo = 0, stack_bytes = UINTPTR_MAX;
  } else {
    fault.kind = kAborted;
    set_text(fault.message, sizeof fault.message, "no address space for the stacks of 1024 threads");
  }
  fflush(stdout);
  return fault.kind == kNone ? nullptr : &fault;
}
