//! The cookie of a log-in.

use cookie::time::Duration;
use cookie::{Cookie, SameSite};

use super::logins::{LOGIN_LIFE, LoginId};

const NAME: &str = "kvgate_login";

/// Cookies of our name that are looked at. A browser sends one; pages of other ports of the host may add some.
const LOOKED_AT: usize = 4;

/// What `Set-Cookie` says after a log-in. `secure` where the browser came over TLS, so that it never sends the cookie in
/// the clear.
#[must_use]
pub fn login_cookie(id: &LoginId, secure: bool) -> String {
    let mut cookie = fresh(id.as_str(), secure);
    cookie.set_max_age(Duration::try_from(LOGIN_LIFE).ok());
    cookie.to_string()
}

/// What `Set-Cookie` says after a log-out.
#[must_use]
pub fn no_cookie(secure: bool) -> String {
    let mut cookie = fresh("", secure);
    cookie.set_max_age(Duration::ZERO);
    cookie.to_string()
}

fn fresh(value: &str, secure: bool) -> Cookie<'_> {
    let mut cookie = Cookie::new(NAME, value);
    cookie.set_http_only(true);
    cookie.set_same_site(SameSite::Strict);
    cookie.set_path("/");
    cookie.set_secure(secure);
    cookie
}

/// The ids of log-ins in the `Cookie` headers of a request.
pub fn login_ids<'a>(headers: impl IntoIterator<Item = &'a str>) -> impl Iterator<Item = String> {
    headers
        .into_iter()
        .flat_map(Cookie::split_parse)
        .filter_map(Result::ok)
        .filter(|cookie| cookie.name() == NAME)
        .map(|cookie| cookie.value().to_owned())
        .take(LOOKED_AT)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::access::logins::Logins;
    use crate::access::tokens::Fingerprint;

    #[test]
    fn the_cookie_is_for_this_service_and_no_script() {
        let id = Logins::default()
            .begin(Fingerprint::of("token"), Instant::now())
            .unwrap();
        let id_text = id.as_str();
        assert_eq!(
            login_cookie(&id, false),
            format!("kvgate_login={id_text}; HttpOnly; SameSite=Strict; Path=/; Max-Age=43200")
        );
        assert!(login_cookie(&id, true).contains("; Secure"));
        assert_eq!(
            no_cookie(true),
            "kvgate_login=; HttpOnly; SameSite=Strict; Secure; Path=/; Max-Age=0"
        );
    }

    #[test]
    fn ids_are_found_among_other_cookies() {
        let ids =
            |headers: &[&str]| -> Vec<String> { login_ids(headers.iter().copied()).collect() };
        assert_eq!(
            ids(&["a=b; kvgate_login=1; =; kvgate_login", "kvgate_login=2"]),
            ["1", "2"]
        );
        assert!(ids(&["KVGATE_LOGIN=1; xkvgate_login=2", ""]).is_empty());
        let many = "kvgate_login=1; ".repeat(100);
        assert_eq!(ids(&[&many]).len(), LOOKED_AT);
    }
}
