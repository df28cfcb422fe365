// SPDX-License-Identifier: Apache-2.0
//
// Error: the exception tree of the engine. What ends an operation is one of
// these; what can be expected is a typed result; what is our own bug is a
// PS_CHECK. The glue maps each class to the Python class of the same name.
//
// A message says what failed, by name and with numbers and units; what was
// expected and what was found; and what to change. Lower case, no final period.
#pragma once

#include <stdexcept>
#include <string>

namespace patrickstar {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A value the caller passed cannot be used.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A budget cannot hold what one operation needs.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// The operating system refused an I/O operation; error_number is its errno.
class IoError : public Error {
 public:
  IoError(const std::string& message, int error_number)
      : Error(message), error_number_(error_number) {}
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

// Bytes read back are not the bytes that were written.
class CorruptData : public Error {
 public:
  using Error::Error;
};

// A valid request for something that this build or state cannot do.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// A bounded wait ended without the awaited event.
class Timeout : public Error {
 public:
  using Error::Error;
};

}  // namespace patrickstar
