//! `crosslane router fib`: shows the forwarding table of a node.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use router_node::control::{METRIC_NEIGHBOUR, RouteKind};
use router_node::management::{FibQuery, Request, Response, Route, RouteHop};
use serde::Serialize;
use stats::{Align, Table};

use super::loaded::LoadedCluster;
use super::request::request;
use crate::output;
use crate::rack_control::{ANSWER_LIMIT, receive};
use crate::wrong_use::WrongUse;

/// Options of `crosslane router fib`.
#[derive(clap::Args)]
pub struct Options {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// The node whose table to show [default: the first that is up]
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// An address: show the route that packets to it take; a network: show the routes within it [default: all routes]
    #[arg(value_name = "ADDRESS|NETWORK")]
    destination: Option<String>,
    /// Print JSON (schema crosslane-router-fib/1)
    #[arg(long)]
    json: bool,
}

/// The output of `crosslane router fib --json`.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    node: String,
    routes: Vec<Route>,
    /// The requested destination; `None` for all routes.
    #[serde(skip)]
    destination: Option<String>,
}

/// Prints the routes of the first requested node that is up.
pub fn main(options: &Options) -> Result<()> {
    let query = query(options.destination.as_deref())?;
    let cluster = LoadedCluster::read(&options.cluster)?;
    let mut found = None;
    for index in cluster.select(options.node.as_deref())? {
        if let Some(routes) = routes(&cluster, index, query)? {
            let (node, destination) = (cluster.name(index).to_owned(), options.destination.clone());
            found = Some(Report { schema: "crosslane-router-fib/1", node, routes, destination });
            break;
        }
    }
    let Some(report) = found else {
        let file = cluster.file.shown();
        let node = options.node.as_ref().map_or("no node".to_owned(), |node| format!("node '{node}'"));
        let what = if options.node.is_some() { "is not up" } else { "is up" };
        bail!("{node} of {file} {what}; start it with 'crosslane router up --cluster {file}'");
    };
    if options.json { output::print_json(&report) } else { output::print(&describe(&report)) }
}

fn query(destination: Option<&str>) -> Result<FibQuery> {
    let Some(text) = destination else { return Ok(FibQuery::default()) };
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(FibQuery { address: Some(address), ..FibQuery::default() });
    }
    match text.parse::<IpNet>() {
        Ok(within) => Ok(FibQuery { within: Some(within.trunc()), ..FibQuery::default() }),
        Err(_) => {
            let example = "write as in 192.0.2.1, 192.0.2.0/24 or 2001:db8::/32";
            bail!(WrongUse::of(format!("'{text}' is neither an address nor a network; {example}")))
        }
    }
}

/// Returns the routes of a node that match `query`; `None` if the node is not up.
fn routes(cluster: &LoadedCluster, index: usize, query: FibQuery) -> Result<Option<Vec<Route>>> {
    let name = cluster.name(index);
    let Some((mut answer, channel)) = request(&cluster.paths.node(name), Request::Fib(query))? else {
        return Ok(None);
    };
    let mut all = Vec::new();
    loop {
        let Response::Fib { routes, is_last } = answer else {
            bail!("node '{name}' answers {answer:?} to a request for its routes; use one release for all")
        };
        all.extend(routes);
        if is_last {
            return Ok(Some(all));
        }
        answer =
            receive(&channel, ANSWER_LIMIT)?.with_context(|| format!("node '{name}' stopped sending its routes"))?;
    }
}

fn describe(report: &Report) -> String {
    if report.routes.is_empty() {
        return match &report.destination {
            Some(destination) => format!("node {}: no route to {destination}\n", report.node),
            None => format!("node {}: no routes\n", report.node),
        };
    }
    let mut table = Table::new(&[("TO", Align::Left), ("METRIC", Align::Right), ("BY", Align::Left)]);
    for route in &report.routes {
        // A neighbour has no metric of its own: its value only ranks it after every route.
        let metric = Some(route.metric).filter(|metric| *metric != METRIC_NEIGHBOUR);
        table.row(vec![
            route.to.to_string(),
            metric.map_or_else(|| "-".to_owned(), |metric| metric.to_string()),
            by(route),
        ]);
    }
    format!("node {}\n{}", report.node, table.render())
}

/// Returns what the route does with packets.
fn by(route: &Route) -> String {
    let hops: Vec<String> = route.hops.iter().map(hop).collect();
    match route.kind {
        _ if route.is_left_out => "no room in the tables: packets take a less specific route, or none".to_owned(),
        RouteKind::Unicast if hops.is_empty() => "no next hop: its nodes are gone".to_owned(),
        RouteKind::Unicast => hops.join(", "),
        RouteKind::Blackhole => "dropped".to_owned(),
        RouteKind::Unreachable => "answered as unreachable".to_owned(),
        RouteKind::Prohibited => "answered as prohibited".to_owned(),
        RouteKind::Throw => "answered as without a route".to_owned(),
    }
}

fn hop(hop: &RouteHop) -> String {
    let RouteHop { node, port, adjacency, weight } = hop;
    let weight = if *weight > 1 { format!(" weight {weight}") } else { String::new() };
    match adjacency {
        0 => format!("{node}:{port}{weight}"),
        adjacency => format!("{node}:{port}#{adjacency}{weight}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_without_a_route_is_reported() {
        let report = |destination: Option<&str>| Report {
            schema: "crosslane-router-fib/1",
            node: "a".to_owned(),
            routes: Vec::new(),
            destination: destination.map(str::to_owned),
        };
        assert_eq!(describe(&report(Some("192.0.2.1"))), "node a: no route to 192.0.2.1\n");
        assert_eq!(describe(&report(None)), "node a: no routes\n");
    }

    #[test]
    fn a_route_without_room_in_the_tables_is_not_shown_as_forwarding() {
        let to = "192.0.2.0/24".parse().unwrap();
        let route = |is_left_out| Route { to, metric: 0, kind: RouteKind::Unicast, hops: Vec::new(), is_left_out };
        assert_eq!(by(&route(true)), "no room in the tables: packets take a less specific route, or none");
        assert_eq!(by(&route(false)), "no next hop: its nodes are gone");
    }
}
