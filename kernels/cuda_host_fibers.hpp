// One fiber per CUDA thread: a stack of its own and a hand-written switch (swapcontext costs 0.7 us, this 2 ns).
// Included by cuda_host_runtime.cpp only.
#pragma once
#include <sys/mman.h>
#if defined(CUDA_HOST_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#include <ucontext.h>
#endif

#include <cstdint>
#include <cstdlib>

namespace cuda_host {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGuardBytes = 64 * 1024;  // at least a page, on machines with 64 KiB pages too

#if defined(__x86_64__) && !defined(CUDA_HOST_UCONTEXT)
extern "C" void cuda_host_switch(void** save, void* load);
asm(R"(
.text
.p2align 4
.hidden cuda_host_switch
.globl cuda_host_switch
.type cuda_host_switch, @function
cuda_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_host_switch, .-cuda_host_switch
)");
using Context = void*;
inline void switch_context(Context& from, Context& to) { cuda_host_switch(&from, to); }
inline void make_context(Context& context, char* stack_top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(stack_top) - 2;  // the ABI wants rsp = 8 mod 16 at a function's first instruction
  *sp = reinterpret_cast<void*>(entry);
  context = sp - 6;
}
#elif defined(__aarch64__) && !defined(CUDA_HOST_UCONTEXT)
extern "C" void cuda_host_switch(void** save, void* load);
asm(R"(
.text
.p2align 4
.hidden cuda_host_switch
.globl cuda_host_switch
.type cuda_host_switch, %function
cuda_host_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size cuda_host_switch, .-cuda_host_switch
)");
using Context = void*;
inline void switch_context(Context& from, Context& to) { cuda_host_switch(&from, to); }
inline void make_context(Context& context, char* stack_top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(stack_top - 160);
  sp[10] = nullptr;  // x29
  sp[11] = reinterpret_cast<void*>(entry);  // x30
  context = sp;
}
#else
using Context = ucontext_t;
inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
inline void make_context(Context& context, char* stack_top, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack_top - kStackBytes;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

// Stacks of one size, reused last in, first out, so that a kernel without barriers runs on a single warm one.
class StackPool {
 public:
  char* take() { return free_ > 0 ? free_list_[--free_] : fresh(); }
  void give(char* stack) { free_list_[free_++] = stack; }
  // Reserves the address space (pages cost memory once touched) and takes every stack back; false: out of memory.
  bool reset() {
    if (base_ == nullptr) {
      void* memory = mmap(nullptr, kSlot * 1024, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) return false;
      base_ = static_cast<char*>(memory);
    }
    free_ = 0;
    for (int i = made_; i-- > 0;) free_list_[free_++] = at(i);
    return true;
  }

 private:
  static constexpr size_t kSlot = kStackBytes + kGuardBytes;
  char* at(int i) const { return base_ + i * kSlot + kGuardBytes; }
  char* fresh() {
    char* stack = at(made_++);
    mprotect(stack - kGuardBytes, kGuardBytes, PROT_NONE);  // a stack overflow is a signal, not a stray write
    return stack;
  }

  char* base_ = nullptr;
  char* free_list_[1024];
  int free_ = 0, made_ = 0;
};

}  // namespace cuda_host
