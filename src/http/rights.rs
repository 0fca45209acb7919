//! Which call needs which right: the one table of it.
//!
//! It is read with the route that was found for a request, so that no way to write a path leads around it. What does not
//! stand in it needs the highest right, and a test fails.

use axum::http::Method;

use crate::access::Right;

/// What a call needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rule {
    /// `None` where nobody has to be known.
    pub(super) right: Option<Right>,
    /// For people: without a log-in they get the form.
    pub(super) is_page: bool,
}

const VIEW: Option<Right> = Some(Right::View);
const CLIENT: Option<Right> = Some(Right::Client);
const ADMIN: Option<Right> = Some(Right::Admin);

/// Whether `/metrics` needs a right is a setting.
pub(super) const METRICS: &str = "/metrics";

/// Calls of programs. A HEAD needs what a GET does.
#[rustfmt::skip]
const API: &[(&str, &str, Option<Right>)] = &[
    ("GET", "/healthz", None),
    ("GET", "/readyz", None),
    ("GET", "/version", None),
    ("GET", METRICS, VIEW),
    ("GET", "/openapi.json", VIEW),
    ("GET", "/v1/leases", VIEW),
    ("POST", "/v1/leases", CLIENT),
    ("GET", "/v1/leases/{lease_id}", VIEW),
    ("DELETE", "/v1/leases/{lease_id}", CLIENT),
    ("POST", "/v1/leases/{lease_id}/release", CLIENT),
    ("POST", "/v1/leases/{lease_id}/renew", CLIENT),
    ("POST", "/v1/leases/{lease_id}/revoke", ADMIN),
    ("GET", "/v1/queue", VIEW),
    ("GET", "/v1/tickets/{ticket_id}", VIEW),
    ("DELETE", "/v1/tickets/{ticket_id}", CLIENT),
    ("POST", "/v1/wait", CLIENT),
    ("POST", "/v1/batch", CLIENT),
    ("GET", "/v1/sessions", VIEW),
    ("GET", "/v1/sessions/{session_id}", VIEW),
    ("POST", "/v1/sessions/{session_id}/close", CLIENT),
    ("GET", "/v1/closes", VIEW),
    ("GET", "/v1/closes/{close_id}", VIEW),
    ("POST", "/v1/closes/{close_id}/retry", CLIENT),
    ("GET", "/v1/state", VIEW),
    ("GET", "/v1/engines", VIEW),
    ("GET", "/v1/epochs", VIEW),
    ("GET", "/v1/decisions", VIEW),
    ("GET", "/v1/history", VIEW),
    ("GET", "/v1/steps", VIEW),
    ("POST", "/v1/steps", CLIENT),
    ("GET", "/v1/steps/current", VIEW),
    ("GET", "/v1/settings", VIEW),
    ("PATCH", "/v1/settings", ADMIN),
    ("GET", "/v1/audit", VIEW),
    ("GET", "/v1/backup", ADMIN),
];

/// Pages.
#[rustfmt::skip]
const PAGES: &[(&str, &str, Option<Right>)] = &[
    ("GET", "/login", None),
    ("POST", "/login", None),
    ("POST", "/logout", None),
    ("GET", "/problems/{code}", None),
    ("GET", "/", VIEW),
    ("GET", "/queue", VIEW),
    ("GET", "/leases", VIEW),
    ("GET", "/engines", VIEW),
    ("GET", "/sessions", VIEW),
    ("GET", "/closes", VIEW),
    ("GET", "/decisions", VIEW),
    ("GET", "/steps", VIEW),
    ("GET", "/steps.csv", VIEW),
    ("GET", "/steps.json", VIEW),
    ("GET", "/settings", VIEW),
    ("GET", "/ticket", VIEW),
    ("GET", "/lease", VIEW),
    ("GET", "/session", VIEW),
    ("GET", "/close", VIEW),
    ("GET", "/search", VIEW),
    // It changes nothing. The page itself says to whom it is of no use.
    ("GET", "/confirm", VIEW),
    ("POST", "/confirm", ADMIN),
    ("POST", "/act", ADMIN),
];

/// Files of pages: part of the program, the same for everybody.
const FILES: &str = "/static/";

/// What a call of this method needs at this route; `None` is where no route was found.
pub(super) fn needed(method: &Method, route: Option<&str>) -> Rule {
    let Some(route) = route else {
        // What there is not, is told to those only who may see what there is.
        return Rule {
            right: VIEW,
            is_page: false,
        };
    };
    listed(method, route).unwrap_or(Rule {
        right: ADMIN,
        is_page: false,
    })
}

fn listed(method: &Method, route: &str) -> Option<Rule> {
    let method = match *method {
        Method::HEAD => "GET",
        ref method => method.as_str(),
    };
    if method == "GET" && route.starts_with(FILES) {
        return Some(Rule {
            right: None,
            is_page: true,
        });
    }
    let row = |table: &[(&str, &str, Option<Right>)], is_page| {
        let row = table
            .iter()
            .find(|(its_method, its_route, _)| *its_method == method && *its_route == route);
        row.map(|(.., right)| Rule {
            right: *right,
            is_page,
        })
    };
    row(API, false).or_else(|| row(PAGES, true))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn method(name: &str) -> Method {
        name.to_uppercase().parse().unwrap()
    }

    /// A route of the API that stands in no row fails here.
    #[test]
    fn every_route_of_the_api_has_its_row() {
        let (_, document) = crate::http::routes().split_for_parts();
        let paths = serde_json::to_value(&document.paths).unwrap();
        let mut count = 0;
        for (path, operations) in paths.as_object().unwrap() {
            for name in operations.as_object().unwrap().keys() {
                let rule = listed(&method(name), path);
                assert!(
                    rule.is_some(),
                    "say in src/http/rights.rs what {name} {path} needs"
                );
                count += 1;
            }
        }
        assert!(count > 25, "{count}");
    }

    /// A route of a page that stands in no row fails here. A router does not tell its routes, so the source does.
    #[test]
    fn every_route_of_a_page_has_its_row() {
        let web = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/web");
        let mut count = 0;
        let mut folders = vec![web];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let source = std::fs::read_to_string(&path).unwrap();
                for (methods, route) in routes_in(&source) {
                    assert!(!methods.is_empty(), "{route}: which methods?");
                    for name in methods {
                        assert!(
                            listed(&method(name), &route).is_some(),
                            "say in src/http/rights.rs what {name} {route} needs"
                        );
                        count += 1;
                    }
                }
            }
        }
        assert!(count >= 5, "{count}");
    }

    /// Methods and path of each `.route("path", get(...).post(...))`.
    fn routes_in(source: &str) -> Vec<(Vec<&'static str>, String)> {
        let source: String = source.split_whitespace().collect();
        let starts = source.match_indices(".route(\"");
        starts
            .map(|(at, start)| {
                let rest = &source[at + start.len()..];
                let (path, rest) = rest.split_once('"').unwrap();
                let mut depth = 1;
                let end = rest.find(|c| {
                    depth += match c {
                        '(' => 1,
                        ')' => -1,
                        _ => 0,
                    };
                    depth == 0
                });
                let handlers = &rest[..end.unwrap()];
                let methods = ["get", "post", "put", "patch", "delete", "any"];
                let found = methods.into_iter().filter(|method| {
                    handlers
                        .match_indices(&format!("{method}("))
                        .any(|(at, _)| handlers[..at].ends_with([',', '.', ':']))
                });
                (found.collect(), path.to_owned())
            })
            .collect()
    }

    #[test]
    fn routes_are_found_in_a_source() {
        let source = "r.route(\"/a\", get(f::forget))\n.route(\n\"/b/{id}\",\n axum::routing::post(g).get(h(1)),\n)";
        let found = routes_in(source);
        assert_eq!(found[0], (vec!["get"], "/a".to_owned()));
        assert_eq!(found[1], (vec!["get", "post"], "/b/{id}".to_owned()));
    }

    #[test]
    fn what_is_not_listed_needs_the_highest_right() {
        let admin = Rule {
            right: ADMIN,
            is_page: false,
        };
        assert_eq!(needed(&Method::PUT, Some("/v1/leases")), admin);
        assert_eq!(needed(&Method::GET, Some("/v1/new")), admin);
        assert_eq!(needed(&Method::POST, Some("/static/app.css")), admin);
        assert_eq!(needed(&Method::OPTIONS, Some("/")), admin);
        assert_eq!(needed(&Method::GET, None).right, VIEW);
        let (head, get) = (Method::HEAD, Method::GET);
        assert_eq!(needed(&head, Some("/v1/backup")), admin);
        assert_eq!(needed(&head, Some("/")), needed(&get, Some("/")));
    }

    /// Who reads the document knows what each call needs.
    #[test]
    fn the_document_tells_what_a_call_needs() {
        let document: serde_json::Value = serde_json::from_str(&crate::http::openapi()).unwrap();
        assert_eq!(
            document["components"]["securitySchemes"]["token"]["scheme"],
            "bearer"
        );
        let paths = &document["paths"];
        let needs = |method: &str, path: &str| {
            paths[path][method]["responses"]["403"]["description"].clone()
        };
        for (method, path, scope) in [
            ("get", "/v1/state", "`view`"),
            ("post", "/v1/leases", "`client`"),
            ("get", "/v1/backup", "`admin`"),
        ] {
            assert!(
                needs(method, path).as_str().unwrap().contains(scope),
                "{path}"
            );
            assert_eq!(
                paths[path][method]["security"],
                serde_json::json!([{"token": []}, {}])
            );
        }
        assert!(needs("get", "/healthz").is_null());
        assert!(paths["/healthz"]["get"]["security"].is_null());
    }

    /// What the contract says: `view` reads everything but a backup, and nothing but `admin` reads that.
    #[test]
    fn reading_needs_view_but_for_backups() {
        for (method, route, right) in API.iter().chain(PAGES) {
            if *method == "GET" && *route != "/v1/backup" {
                assert!(matches!(right, None | Some(Right::View)), "{route}");
            } else if *method != "GET" && route.starts_with("/v1") {
                assert!(right.is_some_and(|right| right > Right::View), "{route}");
            }
        }
        assert_eq!(needed(&Method::GET, Some("/v1/backup")).right, ADMIN);
    }
}
