//! Signs of life on stderr while something takes long; none where stderr is no terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// Something of unknown length.
pub fn spinner(message: impl Into<String>) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message.into());
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

/// So many steps; each sets its own message.
pub fn bar(steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    match ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
