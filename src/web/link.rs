//! Links between pages. All are relative and flat, so that they hold under whatever path the service
//! stands behind.

use super::format::escaped;

/// A page with these parameters; those without a value are left out.
pub(super) fn link(page: &str, parameters: &[(&str, &str)]) -> String {
    let mut link = page.to_owned();
    let mut joint = '?';
    for (name, value) in parameters.iter().filter(|(_, value)| !value.is_empty()) {
        link.push(joint);
        link.push_str(name);
        link.push('=');
        link.push_str(&escaped(value));
        joint = '&';
    }
    link
}

/// The page of one thing.
pub(super) fn to(page: &str, id: &str) -> String {
    link(page, &[("id", id)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_encoded_and_empty_values_left_out() {
        assert_eq!(
            to("ticket", "a/b c&d\"<é"),
            "ticket?id=a%2Fb%20c%26d%22%3C%C3%A9"
        );
        assert_eq!(
            link("queue", &[("q", ""), ("scope", "train"), ("client", "x")]),
            "queue?scope=train&client=x"
        );
        assert_eq!(link("queue", &[("q", "")]), "queue");
    }
}
