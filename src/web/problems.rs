//! The page of one problem: what happened, and what to do about it.

use askama::Template;

/// A stretch of a text: words, or code that stood between backticks.
struct Piece<'a> {
    text: &'a str,
    is_code: bool,
}

struct Part<'a> {
    heading: &'static str,
    pieces: Vec<Piece<'a>>,
}

#[derive(Template)]
#[template(path = "problem.html")]
struct Page<'a> {
    title: &'a str,
    code: &'a str,
    status: u16,
    parts: [Part<'a>; 3],
}

/// The whole page. Texts are escaped; code in them stands between backticks.
///
/// # Errors
/// When the template cannot be written.
pub(crate) fn page(
    title: &str,
    code: &str,
    status: u16,
    happened: &str,
    client: &str,
    operator: &str,
) -> Result<String, askama::Error> {
    Page {
        title,
        code,
        status,
        parts: [
            part("What happened", happened),
            part("What a caller does", client),
            part("What an operator does", operator),
        ],
    }
    .render()
}

fn part<'a>(heading: &'static str, text: &'a str) -> Part<'a> {
    let pieces = text.split('`').enumerate();
    Part {
        heading,
        pieces: pieces
            .map(|(number, text)| Piece {
                text,
                is_code: number % 2 == 1,
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped_and_code_is_marked() {
        let page = page("A <title>", "a&b", 418, "Say `<b>` & go.", "None.", "None.").unwrap();
        assert!(
            page.contains("Say <code>&#60;b&#62;</code> &#38; go."),
            "{page}"
        );
        assert!(
            page.contains("A &#60;title&#62;") && page.contains("a&#38;b"),
            "{page}"
        );
    }
}
