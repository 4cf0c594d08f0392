// The functions that g++ calls for -fsanitize=kernel-address and -fsanitize=undefined, and the checked memcpy.
// Included by cuda_host_runtime.cpp only.
#pragma once
#include "cuda_host_memory.hpp"

using cuda_host::kLoad;
using cuda_host::kStore;
#define CALLER __builtin_return_address(0)
#define CHECKS(SIZE)                                                                                          \
  extern "C" void __asan_load##SIZE##_noabort(uintptr_t p) { cuda_host::on_access(p, SIZE, kLoad, CALLER); }   \
  extern "C" void __asan_store##SIZE##_noabort(uintptr_t p) { cuda_host::on_access(p, SIZE, kStore, CALLER); }
CHECKS(1)
CHECKS(2)
CHECKS(4)
CHECKS(8)
CHECKS(16)
#undef CHECKS

extern "C" {

void __asan_loadN_noabort(uintptr_t p, size_t size) {
  if (size > 0) cuda_host::on_access(p, size, kLoad, CALLER);
}
void __asan_storeN_noabort(uintptr_t p, size_t size) {
  if (size > 0) cuda_host::on_access(p, size, kStore, CALLER);
}

// memcpy, memmove and memset of a size that is no constant stay calls: cuda_host.hpp sends the kernel's here.
void* cuda_host_memcpy(void* to, const void* from, size_t size) {
  if (size == 0) return to;
  cuda_host::check_access(from, size, kLoad, CALLER);
  cuda_host::check_access(to, size, kStore, CALLER);
  return __builtin_memmove(to, from, size);
}
void* cuda_host_memmove(void* to, const void* from, size_t size) {
  if (size == 0) return to;
  cuda_host::check_access(from, size, kLoad, CALLER);
  cuda_host::check_access(to, size, kStore, CALLER);
  return __builtin_memmove(to, from, size);
}
void* cuda_host_memset(void* to, int value, size_t size) {
  if (size == 0) return to;
  cuda_host::check_access(to, size, kStore, CALLER);
  return __builtin_memset(to, value, size);
}

void __asan_register_globals(const cuda_host::RegisteredGlobal* globals, size_t count) {
  using namespace cuda_host;  // runs before this file's constructors: it only notes the array
  if (num_registered < kMaxRegistered) registered[num_registered++] = {globals, count};
}
void __asan_unregister_globals(const cuda_host::RegisteredGlobal*, size_t) {}
void __asan_handle_no_return() {}
void __asan_before_dynamic_init(const char*) {}
void __asan_after_dynamic_init() {}

// UBSan's data (libsanitizer's ubsan_value.h).
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatchData {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment, check_kind;
};
struct OverflowData {
  SourceLocation location;
  const TypeDescriptor* type;
};
struct ShiftData {
  SourceLocation location;
  const TypeDescriptor *value, *amount;
};
struct FloatCastData {
  SourceLocation location;
  const TypeDescriptor *from, *to;
};
struct IndexData {
  SourceLocation location;
  const TypeDescriptor *array, *index;
};

static void locate(const SourceLocation& location) {
  cuda_host::set_text(cuda_host::fault.file, sizeof cuda_host::fault.file, location.file);
  cuda_host::fault.line = location.line;
}

void __ubsan_handle_type_mismatch_v1(TypeMismatchData* data, uintptr_t p) {
  using namespace cuda_host;
  if (stack_bytes == UINTPTR_MAX) return;
  const bool store = data->check_kind == 1;
  if (data->log_alignment == 0) {  // -fsanitize=object-size: the pointer left the variable that it was made from
    if (p >= memory.module_lo && p < memory.module_hi) return;  // the check of the access itself follows
    locate(data->location);
    snprintf(fault.message, sizeof fault.message, "outside the variable that the pointer was made from, accessed as %s",
             data->type->name);
    fail(kMemory, p, 0, store ? kStore : kLoad, nullptr);
  }
  set_text(fault.message, sizeof fault.message, data->type->name);
  fault.index = 1ll << data->log_alignment;
  const char* name = strrchr(data->location.file, '/');
  const bool wrapper = strncmp(name == nullptr ? data->location.file : name + 1, "cuda_host", 9) == 0;
  if (!wrapper) locate(data->location);  // else the line that calls __ldg or its like
  fail(kMisaligned, p, 0, store ? kStore : kLoad, wrapper ? CALLER : nullptr);
}

void __ubsan_handle_out_of_bounds(IndexData* data, uintptr_t value) {
  using namespace cuda_host;
  locate(data->location);
  set_text(fault.object, sizeof fault.object, data->array->name);
  const int bits = 1 << (data->index->info >> 1);
  const bool is_signed = (data->index->info & 1) != 0;
  if (bits > 64) value = *reinterpret_cast<uint64_t*>(value);
  // An unsigned index whose highest bit is set was meant to be negative.
  fault.index = bits >= 64 ? static_cast<int64_t>(value) : static_cast<int64_t>(value << (64 - bits)) >> (64 - bits);
  if (!is_signed && fault.index < 0)
    snprintf(fault.message, sizeof fault.message, "an unsigned index that wrapped below 0, to %llu",
             static_cast<unsigned long long>(value));
  fault.kind = kIndex;
  abandon();
}

static void undefined_at(const SourceLocation& location, const char* what, const TypeDescriptor* type) {
  using namespace cuda_host;
  locate(location);
  snprintf(fault.message, sizeof fault.message, "%s of type %s", what, type->name);
  fault.kind = kUndefined;
  abandon();
}
static void undefined(const OverflowData* data, const char* what) { undefined_at(data->location, what, data->type); }
void __ubsan_handle_divrem_overflow(OverflowData* data, uintptr_t, uintptr_t divisor) {
  undefined(data, divisor == 0 ? "integer division by zero" : "signed overflow in a division");
}
void __ubsan_handle_add_overflow(OverflowData* data, uintptr_t, uintptr_t) { undefined(data, "signed overflow in +"); }
void __ubsan_handle_sub_overflow(OverflowData* data, uintptr_t, uintptr_t) { undefined(data, "signed overflow in -"); }
void __ubsan_handle_mul_overflow(OverflowData* data, uintptr_t, uintptr_t) { undefined(data, "signed overflow in *"); }
void __ubsan_handle_negate_overflow(OverflowData* data, uintptr_t) { undefined(data, "signed overflow in negation"); }
void __ubsan_handle_shift_out_of_bounds(ShiftData* data, uintptr_t, uintptr_t) {
  undefined_at(data->location, "shift by an amount that is negative or not less than the width,", data->value);
}
void __ubsan_handle_float_cast_overflow(FloatCastData* data, uintptr_t) {
  char what[160];
  snprintf(what, sizeof what, "NaN or a number out of range converted from %s to an integer", data->from->name);
  undefined_at(data->location, what, data->to);
}

}  // extern "C"
