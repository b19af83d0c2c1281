//! temp
use brigade_device::{Bootstrap, Error, Result};
use std::time::Duration;
pub(crate) fn vote(boot: &dyn Bootstrap, step: &'static str, mine: &[u8], within: Duration) -> Result<()> {
    let all = boot.all_gather(mine, within)?;
    if all.iter().all(|m| m == mine) { return Ok(()); }
    Err(Error::Group { step, what: format!("{:?}", all.iter().map(|m| String::from_utf8_lossy(m).into_owned()).collect::<Vec<_>>()) })
}
pub(crate) fn agree<T>(boot: &dyn Bootstrap, step: &'static str, mine: Result<T>, within: Duration) -> Result<T> {
    let text = mine.as_ref().err().map(|e| e.to_string()).unwrap_or_default();
    let all = boot.all_gather(text.as_bytes(), within)?;
    let v = mine?;
    if all.iter().all(|m| m.is_empty()) { return Ok(v); }
    Err(Error::Group { step, what: format!("{:?}", all.iter().map(|m| String::from_utf8_lossy(m).into_owned()).collect::<Vec<_>>()) })
}
