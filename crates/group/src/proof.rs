//! Proving that both sides have the same secret, without showing it.
//!
//! HMAC-SHA256 challenge and response, in both directions. Each proof is about who proves, the protocol's version, the
//! group's size, the rank, the group's session and a fresh number from each side: an old proof proves nothing in another
//! connection, and a proof sent back to its sender proves nothing there. Whoever connects proves first, so that rank 0
//! gives a stranger nothing to guess at.
//!
//! What follows the proofs is neither encrypted nor signed: against someone who can rewrite packets on the way, use a
//! network that keeps them out.

use crate::frame::VERSION;
use brigade_device::{Error, Result};
use hmac::{
    Hmac, Mac,
    digest::{Key, KeyInit},
};
use sha2::{Digest, Sha256};
use std::{fmt, sync::Arc};

/// Fewest bytes of a secret: fewer could be guessed by whoever once saw a proof.
const LEAST_BYTES: usize = 16;

type Keyed = Hmac<Sha256>;

/// What all ranks of a group know and nobody else does. At least 16 bytes, best from a random number generator.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<[u8]>);

impl Secret {
    /// # Errors
    /// [`Error::Invalid`] if it is too short; it is not shown.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self> {
        Self::named("secret", bytes.as_ref())
    }

    pub(crate) fn named(field: &'static str, bytes: &[u8]) -> Result<Self> {
        if bytes.len() < LEAST_BYTES {
            return Err(Error::invalid(
                field,
                format!("a secret of {} bytes", bytes.len()),
                format!("at least {LEAST_BYTES} bytes, best random ones"),
            ));
        }
        Ok(Self(bytes.into()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Who proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prover {
    Member = 1,
    Root = 2,
}

/// What both proofs of one connection are about.
#[derive(Clone, Copy)]
pub(crate) struct Meeting {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) session: [u8; 16],
    pub(crate) member_nonce: [u8; 32],
    pub(crate) root_nonce: [u8; 32],
}

impl Meeting {
    /// Without a secret this proves nothing, and is only a check that both sides mean the same meeting.
    pub(crate) fn proof(&self, secret: Option<&Secret>, by: Prover) -> [u8; 32] {
        self.mac(secret, by).finalize().into_bytes().into()
    }

    /// Whether this is the proof; takes as long whatever is wrong with it.
    pub(crate) fn is_proven(&self, secret: Option<&Secret>, by: Prover, tag: &[u8; 32]) -> bool {
        self.mac(secret, by).verify_slice(tag).is_ok()
    }

    fn mac(&self, secret: Option<&Secret>, by: Prover) -> Keyed {
        let mut key = Key::<Keyed>::default();
        if let Some(secret) = secret {
            let digest = Sha256::new()
                .chain_update(b"brigade secret\0")
                .chain_update(&secret.0)
                .finalize();
            key[..digest.len()].copy_from_slice(&digest);
        }
        <Keyed as KeyInit>::new(&key)
            .chain_update(b"brigade rendezvous\0")
            .chain_update([by as u8])
            .chain_update(VERSION.to_le_bytes())
            .chain_update(self.size.to_le_bytes())
            .chain_update(self.rank.to_le_bytes())
            .chain_update(self.session)
            .chain_update(self.member_nonce)
            .chain_update(self.root_nonce)
    }
}

/// Numbers that nobody can foresee.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::Backend {
        call: "getrandom",
        code: error.raw_os_error().unwrap_or(0).into(),
        source: None,
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meeting() -> Meeting {
        Meeting {
            rank: 1,
            size: 2,
            session: [3; 16],
            member_nonce: [4; 32],
            root_nonce: [5; 32],
        }
    }

    #[test]
    fn a_proof_is_about_everything_in_the_meeting() {
        let secret = Secret::new([7; 16]).unwrap();
        let other = Secret::new([8; 16]).unwrap();
        let all: [Meeting; 6] = [
            meeting(),
            Meeting {
                rank: 2,
                ..meeting()
            },
            Meeting {
                size: 3,
                ..meeting()
            },
            Meeting {
                session: [0; 16],
                ..meeting()
            },
            Meeting {
                member_nonce: [5; 32],
                ..meeting()
            },
            Meeting {
                root_nonce: [4; 32],
                ..meeting()
            },
        ];
        let mut proofs = Vec::new();
        for secret in [None, Some(&secret), Some(&other)] {
            for by in [Prover::Member, Prover::Root] {
                for (i, about) in all.iter().enumerate() {
                    let proof = about.proof(secret, by);
                    assert!(about.is_proven(secret, by, &proof));
                    assert_eq!(meeting().is_proven(secret, by, &proof), i == 0);
                    proofs.push(proof);
                }
            }
        }
        let count = proofs.len();
        proofs.sort_unstable();
        proofs.dedup();
        assert_eq!(proofs.len(), count);
    }

    #[test]
    fn a_secret_is_long_enough_and_never_shown() {
        let error = Secret::new("hunter2").unwrap_err();
        assert_eq!(
            error.to_string(),
            "secret: got a secret of 7 bytes, wanted at least 16 bytes, best random ones"
        );
        let secret = Secret::new("correct horse battery staple").unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }
}
