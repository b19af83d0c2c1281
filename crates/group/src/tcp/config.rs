//! How a group of processes is set up.

use super::Address;
use crate::{Secret, frame::MOST_RANKS};
use brigade_device::{Error, Result};
use std::{ffi::OsString, time::Duration};

/// One rank's view of a group of processes. All but `rank` and `local_rank` is the same on every rank.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// This rank's number.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
    /// This rank's number on its machine, if whoever started it said so: which accelerator to take.
    pub local_rank: Option<usize>,
    /// Where rank 0 listens while the group forms.
    pub address: Address,
    /// What all ranks know and nobody else does. Needed wherever `address` can be reached from other machines.
    pub secret: Option<Secret>,
    /// How long ranks wait for each other at first. Default: 60 s.
    pub join_within: Duration,
    /// How often a rank says that it is still there. Only over TCP; of a process that dies the system tells. Default:
    /// 300 ms.
    pub heartbeat: Duration,
    /// How long a rank may be silent before it counts as lost. Long enough for a busy machine to get to it. Default: 3 s.
    pub silent_after: Duration,
}

impl TcpConfig {
    /// No secret, and the defaults of the fields.
    pub fn new(rank: usize, size: usize, address: Address) -> Self {
        Self {
            rank,
            size,
            local_rank: None,
            address,
            secret: None,
            join_within: Duration::from_secs(60),
            heartbeat: Duration::from_millis(300),
            silent_after: Duration::from_secs(3),
        }
    }

    /// From the variables that torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK if there is one.
    /// MASTER_ADDR may be `unix:/path`, and needs no port then. Where torchrun's agent listens at MASTER_PORT itself, as
    /// TORCHELASTIC_USE_AGENT_STORE says, rank 0 listens at the next one; BRIGADE_PORT names another. BRIGADE_SECRET is the secret, or BRIGADE_SECRET_FILE the
    /// file that it is in (a line break at its end is not part of it).
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the variable, what it was and what it should be.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(std::env::var_os)
    }

    /// As [`from_env`](Self::from_env), from elsewhere than this process's environment.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&'static str) -> Option<OsString>) -> Result<Self> {
        let variables = Variables(&variable);
        let size = variables.number("WORLD_SIZE", 1, MOST_RANKS)?;
        let rank = variables.number("RANK", 0, size - 1)?;
        let local_rank = match variable("LOCAL_RANK") {
            Some(_) => Some(variables.number("LOCAL_RANK", 0, size - 1)?),
            None => None,
        };
        const WHERE: &str = "where rank 0 listens: a host, or unix:/path";
        let host = variables.text("MASTER_ADDR", WHERE)?;
        let address = match host.strip_prefix("unix:") {
            Some("") => return Err(Error::invalid("MASTER_ADDR", host, WHERE)),
            Some(path) => Address::Unix(path.into()),
            None => Address::tcp(&host, variables.port()?),
        };
        let mut config = Self::new(rank, size, address);
        config.local_rank = local_rank;
        config.secret = variables.secret()?;
        config.check()?;
        Ok(config)
    }

    /// This rank's view of the group of those that are left when ranks are lost: the same order, a place of its own to
    /// meet. All who are left call it with the same values.
    ///
    /// # Errors
    /// [`Error::Invalid`] if this rank is among the lost, or a lost one is none of the group.
    pub fn without(&self, lost: &[usize], address: Address) -> Result<Self> {
        for &rank in lost {
            if rank >= self.size || rank == self.rank {
                let want = format!("another rank of the {} than {}", self.size, self.rank);
                return Err(Error::invalid("lost", rank, want));
            }
        }
        let left: Vec<usize> = (0..self.size).filter(|r| !lost.contains(r)).collect();
        let mine = left.iter().filter(|&&r| r < self.rank);
        Ok(Self {
            rank: mine.count(),
            size: left.len(),
            address,
            ..self.clone()
        })
    }

    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<()> {
        if !(1..=MOST_RANKS).contains(&self.size) {
            return Err(Error::invalid(
                "size",
                self.size,
                format!("1 to {MOST_RANKS}"),
            ));
        }
        if self.rank >= self.size {
            let below = format!("a number below the size, {}", self.size);
            return Err(Error::invalid("rank", self.rank, below));
        }
        for (field, time, least) in [
            ("join_within", self.join_within, Duration::ZERO),
            ("heartbeat", self.heartbeat, Duration::ZERO),
            ("silent_after", self.silent_after, self.heartbeat),
        ] {
            if time <= least || time > Duration::from_secs(86_400) {
                let want = format!("more than {least:?} and at most a day");
                return Err(Error::invalid(field, format!("{time:?}"), want));
            }
        }
        self.address.check_form()
    }
}

struct Variables<'a, F>(&'a F);

impl<F: Fn(&'static str) -> Option<OsString>> Variables<'_, F> {
    fn text(&self, name: &'static str, want: &str) -> Result<String> {
        let value = (self.0)(name).ok_or_else(|| Error::invalid(name, "nothing", want))?;
        match value.into_string() {
            Ok(text) if !text.is_empty() => Ok(text),
            Ok(_) => Err(Error::invalid(name, "an empty text", want)),
            Err(other) => Err(Error::invalid(name, format!("{other:?}"), want)),
        }
    }

    fn number(&self, name: &'static str, least: usize, most: usize) -> Result<usize> {
        let want = format!("a number, {least} to {most}");
        let text = self.text(name, &want)?;
        match text.parse() {
            Ok(number) if (least..=most).contains(&number) => Ok(number),
            _ => Err(Error::invalid(name, format!("{text:?}"), want)),
        }
    }

    fn port(&self) -> Result<u16> {
        if (self.0)("BRIGADE_PORT").is_some() {
            return Ok(self.number("BRIGADE_PORT", 1, 65535)? as u16);
        }
        let agent = (self.0)("TORCHELASTIC_USE_AGENT_STORE");
        let taken = agent.is_some_and(|v| v.eq_ignore_ascii_case("true") || v == "1");
        let next = usize::from(taken);
        Ok((self.number("MASTER_PORT", 1, 65535 - next)? + next) as u16)
    }

    fn secret(&self) -> Result<Option<Secret>> {
        const FILE: &str = "BRIGADE_SECRET_FILE";
        const SECRET: &str = "BRIGADE_SECRET";
        match ((self.0)(SECRET), (self.0)(FILE)) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => Err(Error::invalid(
                FILE,
                "something",
                format!("nothing, as {SECRET} is set"),
            )),
            (Some(text), None) => match text.to_str() {
                Some(text) => Secret::named(SECRET, text.as_bytes()).map(Some),
                None => Err(Error::invalid(
                    SECRET,
                    "what is not Unicode",
                    "text, or a file",
                )),
            },
            (None, Some(path)) => {
                let read = std::fs::read(&path).map_err(|error| {
                    let path = path.display();
                    Error::invalid(FILE, format!("{path} ({error})"), "a file that can be read")
                })?;
                let end = read.iter().rposition(|b| !b"\r\n".contains(b));
                Secret::named(FILE, &read[..end.map_or(0, |e| e + 1)]).map(Some)
            }
        }
    }
}
