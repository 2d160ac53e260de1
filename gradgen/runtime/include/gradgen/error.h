// The errors of the runtime. Each maps to the Python class of the same name under `gradgen`.
#pragma once

#include <stdexcept>
#include <string>

namespace gradgen {

/// Base of everything the runtime throws on purpose.
class Error : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// A configuration that a model cannot have: a missing dimension, a broken requirement.
class ConfigError : public Error {
    using Error::Error;
};

/// A call that the manager's state does not allow; the message names model, weight or block, micro-step and cure.
class StateError : public Error {
    using Error::Error;
};

/// A collective that could not be completed.
class CommError : public Error {
    using Error::Error;
};

/// A rank ended or left.
class PeerLost : public CommError {
    using CommError::CommError;
};

/// A rank did not arrive within the communicator's time limit.
class CommTimeout : public CommError {
    using CommError::CommError;
};

/// Ranks disagree about what they are doing: another model, layout, strategy or operation.
class MismatchError : public CommError {
    using CommError::CommError;
};

/// Gradients hold inf or nan and the manager was told to raise.
class NonFiniteError : public Error {
    using Error::Error;
};

}  // namespace gradgen
