// Links libmoss_kernels.so as a server would and calls it. Runs with and without a GPU.
#include <string>
#include <thread>

#include "check.h"

extern "C" uint32_t device_info_size_in_c(void);

namespace {

void test_version() {
  CHECK(std::string(moss_version()).find('.') != std::string::npos);
  CHECK(moss_abi_version() == MOSS_ABI_VERSION);
  CHECK(device_info_size_in_c() == sizeof(MossDeviceInfo));
}

void test_status_strings() {
  CHECK(std::string(moss_status_string(MOSS_OK)) == "MOSS_OK");
  CHECK(std::string(moss_status_string(MOSS_ERROR_INVALID_ARGUMENT)) == "MOSS_ERROR_INVALID_ARGUMENT");
  CHECK(std::string(moss_status_string(MOSS_ERROR_UNSUPPORTED)) == "MOSS_ERROR_UNSUPPORTED");
  CHECK(std::string(moss_status_string(MOSS_ERROR_NO_DEVICE)) == "MOSS_ERROR_NO_DEVICE");
  CHECK(std::string(moss_status_string(MOSS_ERROR_CUDA)) == "MOSS_ERROR_CUDA");
  CHECK(std::string(moss_status_string(static_cast<MossStatus>(7))) == "unknown status");
}

void test_bad_arguments() {
  CHECK(moss_last_error_message()[0] == '\0');
  CHECK(moss_device_query(0, nullptr) == MOSS_ERROR_INVALID_ARGUMENT);
  CHECK(message_contains("`moss_device_query`") && message_contains("null"));

  auto info = with_header<MossDeviceInfo>();
  info.struct_size -= 4;
  CHECK(moss_device_query(0, &info) == MOSS_ERROR_INVALID_ARGUMENT);
  CHECK(message_contains("`struct_size` must be 48, got 44"));

  info = with_header<MossDeviceInfo>();
  info.abi_version = MOSS_ABI_VERSION + 1;
  CHECK(moss_device_query(0, &info) == MOSS_ERROR_INVALID_ARGUMENT);
  CHECK(message_contains("`abi_version` must be 1, got 2"));
}

void test_messages_belong_to_their_thread() {
  CHECK(moss_device_query(0, nullptr) == MOSS_ERROR_INVALID_ARGUMENT);
  std::string elsewhere = "unset";
  std::thread([&elsewhere] { elsewhere = moss_last_error_message(); }).join();
  CHECK(elsewhere.empty());
  CHECK(moss_last_error_message()[0] != '\0');
}

void test_device_query() {
  auto info = with_header<MossDeviceInfo>();
  info.device_count = -1;
  const MossStatus status = moss_device_query(0, &info);
  if (status == MOSS_ERROR_NO_DEVICE) {
    CHECK(info.device_count == 0);
    CHECK(message_contains("cudaGetDeviceCount"));
    std::printf("no GPU: %s\n", moss_last_error_message());
    return;
  }
  CHECK(status == MOSS_OK);
  CHECK(info.device_count > 0 && info.multiprocessors > 0 && info.l2_bytes > 0 && info.memory_bytes > 0);
  CHECK(info.compute_capability_major >= 5);
  std::printf("GPU 0 of %d: compute capability %d.%d, %s code for it\n", info.device_count,
              info.compute_capability_major, info.compute_capability_minor, info.has_device_code ? "with" : "no");
  CHECK(moss_device_query(info.device_count, &info) == MOSS_ERROR_INVALID_ARGUMENT);
  CHECK(message_contains("`device` must be 0 .."));
  CHECK(moss_device_query(-1, &info) == MOSS_ERROR_INVALID_ARGUMENT);
}

}  // namespace

int main() {
  test_version();
  test_status_strings();
  test_bad_arguments();
  test_messages_belong_to_their_thread();
  test_device_query();
  std::printf("libmoss_kernels %s: %s\n", moss_version(), failures ? "FAILED" : "ok");
  return failures != 0;
}
