//! What commands write on stdout, and what of it is colour.
//!
//! Promises: a reader that went away (`| head`) ends nothing; colour only on a terminal and never with
//! `NO_COLOR`; text that others chose cannot move the cursor or turn the line around.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Effects, Style};
use serde::Serialize;

use crate::boot::Failure;

/// What asks for attention.
pub(super) const BAD: Style = AnsiColor::Red.on_default().effects(Effects::BOLD);
/// What should be looked at.
pub(super) const WARN: Style = AnsiColor::Yellow.on_default().effects(Effects::BOLD);
/// What is as it should be.
pub(super) const GOOD: Style = AnsiColor::Green.on_default();
/// What stands beside the thing itself.
pub(super) const DIM: Style = Style::new().effects(Effects::DIMMED);
/// Names of columns and of groups.
pub(super) const HEAD: Style = Style::new().effects(Effects::BOLD);

/// Text in a style. [`print()`] takes the style away where it does not belong.
pub(super) fn styled(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

/// Writes data as it stands, such as a document for another program.
pub(super) fn print_raw(text: &str) -> Result<(), Failure> {
    written(&mut io::stdout().lock(), text)
}

/// Writes text for people, in colour where it belongs.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    let stdout = io::stdout().lock();
    // A terminal alone is not enough: NO_COLOR and TERM=dumb are asked as well.
    let colour = stdout.is_terminal() && AutoStream::choice(&stdout) != ColorChoice::Never;
    let choice = match colour {
        true => ColorChoice::Always,
        false => ColorChoice::Never,
    };
    written(&mut AutoStream::new(stdout, choice), text)
}

/// Writes JSON with a line end. Control characters that JSON allows as they are become escapes, since
/// a terminal may obey them.
pub(super) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::other)?;
    let mut safe = String::with_capacity(text.len().saturating_add(1));
    for letter in text.chars() {
        if letter != '\n' && moves_the_cursor(letter) {
            // Writing to a string never fails.
            let _ = write!(safe, "\\u{:04x}", u32::from(letter));
        } else {
            safe.push(letter);
        }
    }
    safe.push('\n');
    print_raw(&safe)
}

/// One line for people on stderr. Nobody may read it, and that ends nothing.
pub(super) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "kvgate: {text}");
}

/// A broken pipe is the reader's way to say that it has enough.
fn written(out: &mut impl Write, text: &str) -> Result<(), Failure> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => {
            result.map_err(|error| Failure::other(format!("stdout cannot be written: {error}")))
        }
    }
}

/// Text that others chose, as it may stand on a terminal.
pub(super) fn plain(text: &str) -> Cow<'_, str> {
    if !text.chars().any(moves_the_cursor) {
        return Cow::Borrowed(text);
    }
    let letter = |letter: char| match moves_the_cursor(letter) {
        true => letter.escape_unicode().to_string(),
        false => letter.to_string(),
    };
    Cow::Owned(text.chars().map(letter).collect())
}

/// Control characters, and those that change the direction of what follows.
fn moves_the_cursor(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2028}' | '\u{2029}'
                | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_went_away_is_no_error_and_a_full_disk_is() {
        assert!(written(&mut Gone, "text").is_ok());
        assert!(written(&mut Full, "text").is_err());
    }

    #[test]
    fn text_of_others_cannot_move_the_cursor() {
        assert_eq!(plain("s-7/ä%"), "s-7/ä%");
        assert_eq!(plain("a\u{1b}[2Jb"), "a\\u{1b}[2Jb");
        assert_eq!(plain("a\u{202e}b\u{9b}"), "a\\u{202e}b\\u{9b}");
    }
}
