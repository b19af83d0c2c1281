//! Brigade's error inside candle's.

use std::io::{self, ErrorKind};

/// Brigade's error, as [`candle_core::Error`] carries it.
///
/// candle's error is one enum, closed to others; what it lets through with its type kept is [`candle_core::Error::Io`]. So an
/// error of Brigade's travels there, and has a kind of the standard library's for who does not know Brigade:
/// [`TimedOut`](ErrorKind::TimedOut) for a rank that did not come, [`ConnectionAborted`](ErrorKind::ConnectionAborted) for one
/// that is gone.
#[derive(Clone, Debug)]
struct Carried(brigade::Error);

impl std::fmt::Display for Carried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Carried {
    /// Brigade's error itself, so that who walks over the sources of candle's error meets it.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// Brigade's error behind candle's, also where candle's has got context, a path or a backtrace.
///
/// ```
/// use brigade_candle::{brigade, brigade_error, to_candle};
///
/// let error = to_candle(brigade::Error::Closed).context("layer 3");
/// assert!(matches!(brigade_error(&error), Some(brigade::Error::Closed)));
/// assert_eq!(brigade_error(&candle_core::Error::msg("not ours")).is_none(), true);
/// ```
pub fn brigade_error(error: &candle_core::Error) -> Option<&brigade::Error> {
    use candle_core::Error as E;
    match error {
        E::Io(error) => of_io(error),
        E::Context { inner, .. } | E::WithPath { inner, .. } | E::WithBacktrace { inner, .. } => {
            brigade_error(inner)
        }
        // What candle's `Context` trait makes of a result.
        E::WrappedContext { wrapped, .. } => {
            let wrapped: &(dyn std::error::Error + 'static) = &**wrapped;
            if let Some(error) = wrapped.downcast_ref() {
                return Some(error);
            }
            if let Some(error) = wrapped.downcast_ref::<io::Error>() {
                return of_io(error);
            }
            wrapped.downcast_ref().and_then(brigade_error)
        }
        _ => None,
    }
}

fn of_io(error: &io::Error) -> Option<&brigade::Error> {
    let carried: &Carried = error.get_ref()?.downcast_ref()?;
    Some(&carried.0)
}

/// Brigade's error as one of candle's, from which [`brigade_error`] takes it out again.
pub fn to_candle(error: brigade::Error) -> candle_core::Error {
    candle_core::Error::Io(io::Error::new(kind(&error), Carried(error)))
}

fn kind(error: &brigade::Error) -> ErrorKind {
    use brigade::{Error as E, FaultKind};
    match error {
        E::Invalid { .. } => ErrorKind::InvalidInput,
        E::Unsupported(_) => ErrorKind::Unsupported,
        E::Busy(_) => ErrorKind::ResourceBusy,
        E::Closed => ErrorKind::NotConnected,
        E::Fault(record) => match record.kind {
            FaultKind::Timeout => ErrorKind::TimedOut,
            FaultKind::PeerLost => ErrorKind::ConnectionAborted,
            FaultKind::Aborted => ErrorKind::Interrupted,
            FaultKind::Mismatch => ErrorKind::InvalidData,
            FaultKind::Overflow => ErrorKind::OutOfMemory,
        },
        _ => ErrorKind::Other,
    }
}

/// `?` from Brigade's results to candle's.
pub(crate) trait OrCandle<T> {
    fn or_candle(self) -> candle_core::Result<T>;
}

impl<T> OrCandle<T> for brigade::Result<T> {
    fn or_candle(self) -> candle_core::Result<T> {
        self.map_err(to_candle)
    }
}

/// What a caller passed and should not have.
pub(crate) fn invalid(
    field: &'static str,
    got: impl ToString,
    want: impl ToString,
) -> candle_core::Error {
    to_candle(brigade::Error::invalid(field, got, want))
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade::{Error, FaultKind, FaultRecord};
    use candle_core::Context;

    fn fault(kind: FaultKind) -> Error {
        let words = [kind as u64, 0, 0, 0, 0, 0, 0, 0];
        Error::Fault(FaultRecord::from_words(words).unwrap())
    }

    #[test]
    fn the_error_comes_out_as_it_went_in_whatever_candle_wrapped_around_it() {
        let plain = || to_candle(fault(FaultKind::PeerLost));
        let wrapped = [
            plain(),
            plain().bt(),
            plain().context("layer 3"),
            plain().context("layer 3").with_path("model").context("x"),
            Err::<(), _>(plain()).context("layer 3").unwrap_err(),
            Err::<(), _>(fault(FaultKind::PeerLost))
                .context("layer 3")
                .unwrap_err(),
        ];
        for error in wrapped {
            let record = brigade_error(&error).and_then(Error::fault);
            assert_eq!(record.unwrap().kind, FaultKind::PeerLost, "{error}");
        }
    }

    #[test]
    fn the_standard_library_meets_it_as_a_source() {
        let error = to_candle(Error::Closed);
        assert_eq!(error.to_string(), "communicator closed");
        let source = std::error::Error::source(&error).unwrap();
        assert!(matches!(source.downcast_ref(), Some(Error::Closed)));
    }

    #[test]
    fn errors_of_others_are_nobodys() {
        let others = [
            candle_core::Error::msg("x"),
            candle_core::Error::Io(io::Error::other("x")),
            candle_core::Error::Io(io::Error::from(ErrorKind::TimedOut)),
            candle_core::Error::msg("x").context("y"),
        ];
        for error in others {
            assert!(brigade_error(&error).is_none(), "{error}");
        }
    }

    #[test]
    fn who_does_not_know_brigade_sees_a_kind() {
        for (error, want) in [
            (fault(FaultKind::Timeout), ErrorKind::TimedOut),
            (fault(FaultKind::PeerLost), ErrorKind::ConnectionAborted),
            (fault(FaultKind::Aborted), ErrorKind::Interrupted),
            (fault(FaultKind::Mismatch), ErrorKind::InvalidData),
            (Error::invalid("x", 1, 2), ErrorKind::InvalidInput),
            (Error::Closed, ErrorKind::NotConnected),
        ] {
            let candle_core::Error::Io(io) = to_candle(error) else {
                panic!("another variant");
            };
            assert_eq!(io.kind(), want);
        }
    }
}
