//! A caller's connection, and what is answered to it.

use std::collections::BTreeMap;

use redis_protocol::resp2::decode::decode_range;
use redis_protocol::resp2::encode::encode_borrowed;
use redis_protocol::resp2::types::{BorrowedFrame, RangeFrame};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Seconds that one call waits for its grant.
const WAIT_S: &str = "25";

pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// One command at a time over a connection, whose buffers are used again and again.
pub struct Connection {
    stream: Box<dyn Stream>,
    sent: Vec<u8>,
    got: Vec<u8>,
    length: usize,
}

/// What a script or a list answers.
#[derive(Debug, PartialEq)]
pub enum Answer<'a> {
    Nothing,
    Number(i64),
    Text(&'a str),
    List(Vec<Answer<'a>>),
}

impl Connection {
    pub fn new(stream: Box<dyn Stream>) -> Self {
        Self {
            stream,
            sent: Vec::new(),
            got: vec![0; 16 << 10],
            length: 0,
        }
    }

    pub async fn ask(&mut self, words: &[&str]) -> Answer<'_> {
        encode(&mut self.sent, words);
        self.stream.write_all(&self.sent).await.unwrap();
        self.length = 0;
        let frame = loop {
            let read = self
                .stream
                .read(&mut self.got[self.length..])
                .await
                .unwrap();
            assert!(read > 0, "Redis closed the connection");
            self.length += read;
            if let Some((frame, length)) = decode_range(&self.got[..self.length]).unwrap() {
                assert_eq!(length, self.length, "one answer to one command");
                break frame;
            }
            if self.length == self.got.len() {
                self.got.resize(2 * self.length, 0);
            }
        };
        answer(&self.got, frame)
    }

    /// Runs a script by the name that SCRIPT LOAD gave it.
    pub async fn run(&mut self, script: &str, arguments: &[&str]) -> Answer<'_> {
        let mut words = Vec::with_capacity(arguments.len() + 3);
        words.extend_from_slice(&["EVALSHA", script, "0"]);
        words.extend_from_slice(arguments);
        self.ask(&words).await
    }

    /// Takes the lease that a release has granted to this ticket meanwhile or grants it later.
    pub async fn granted(&mut self, ticket: &str) -> Option<String> {
        let list = format!("granted:{ticket}");
        match self.ask(&["BLPOP", &list, WAIT_S]).await {
            Answer::List(pair) => match pair.as_slice() {
                [_, Answer::Text(lease)] => Some((*lease).to_owned()),
                other => panic!("{other:?}"),
            },
            Answer::Nothing => None,
            other => panic!("{other:?}"),
        }
    }

    /// The figures of INFO, or the fields of a hash.
    pub async fn fields(&mut self, words: &[&str]) -> BTreeMap<String, String> {
        match self.ask(words).await {
            Answer::Text(text) => text
                .lines()
                .filter_map(|line| line.split_once(':'))
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
            Answer::List(fields) => fields
                .chunks(2)
                .map(|pair| match pair {
                    [Answer::Text(name), Answer::Text(value)] => {
                        ((*name).to_owned(), (*value).to_owned())
                    }
                    other => panic!("{other:?}"),
                })
                .collect(),
            other => panic!("{other:?}"),
        }
    }

    pub async fn number(&mut self, words: &[&str]) -> i64 {
        match self.ask(words).await {
            Answer::Number(number) => number,
            other => panic!("{words:?}: {other:?}"),
        }
    }
}

fn encode(sent: &mut Vec<u8>, words: &[&str]) {
    let words: Vec<BorrowedFrame<'_>> = words
        .iter()
        .map(|word| BorrowedFrame::BulkString(word.as_bytes()))
        .collect();
    let frame = BorrowedFrame::Array(&words);
    sent.resize(frame.encode_len(false), 0);
    encode_borrowed(sent, &frame, false).unwrap();
}

fn answer(got: &[u8], frame: RangeFrame) -> Answer<'_> {
    let text = |range: (usize, usize)| std::str::from_utf8(&got[range.0..range.1]).unwrap();
    match frame {
        RangeFrame::SimpleString(range) | RangeFrame::BulkString(range) => {
            Answer::Text(text(range))
        }
        RangeFrame::Error(range) => panic!("Redis answers {}", text(range)),
        RangeFrame::Integer(number) => Answer::Number(number),
        RangeFrame::Null => Answer::Nothing,
        RangeFrame::Array(frames) => {
            Answer::List(frames.into_iter().map(|frame| answer(got, frame)).collect())
        }
    }
}
