'use strict';
// Names come from clients and engines: they reach the document as text nodes only.

const maxRows = 200;
const $ = (id) => document.getElementById(id);
const cells = new Map(); // "worker/rank" -> {button, box, worker, rank}
const boxes = new Map(); // worker -> {box, title, role, cells}
const rows = new Map(); // request -> {tr, row}, oldest first
let last = null; // the status before, for rates
let focused = null; // the cell that the tab key reaches
let paused = false;

function el(tag, className, ...children) {
  const e = document.createElement(tag);
  if (className) e.className = className;
  e.append(...children.map((c) => (c instanceof Node ? c : String(c))));
  return e;
}

const number = (n) => Number(n).toLocaleString('en');
const share = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : '–');
function seconds(s) {
  if (!s) return '';
  if (s < 1e-3) return `${Math.round(s * 1e6)} µs`;
  return s < 1 ? `${(s * 1e3).toFixed(1)} ms` : `${s.toFixed(2)} s`;
}

async function ask(path, options = {}) {
  const token = sessionStorage.getItem('token');
  const headers = token ? { ...options.headers, Authorization: `Bearer ${token}` } : options.headers;
  const answer = await fetch(path, { ...options, headers });
  $('login').hidden = answer.status !== 401;
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer;
}

function say(text, bad) {
  if ($('state').textContent !== text) $('state').textContent = text;
  $('state').classList.toggle('bad', bad);
}

// Totals

function totals(s, now) {
  const ranks = s.workers.flatMap((w) => w.ranks);
  const count = (list, f) => list.filter(f).length;
  const rate = last ? (s.requests_total - last.requests) / ((now - last.at) / 1000) : 0;
  last = { requests: s.requests_total, at: now };
  const ready = count(s.workers, (w) => w.ready && !w.draining);
  const dull = count(ranks, (r) => r.feed !== 'live');
  const tiles = [
    ['workers ready', `${ready} of ${s.workers.length}`, ready < s.workers.length],
    ['ranks', number(ranks.length)],
    ['requests per second', rate.toFixed(rate < 10 ? 1 : 0)],
    ['running', number(s.reservations)],
    ['in the queue', s.waiting_max ? `${s.waiting} of ${s.waiting_max}` : 'off'],
    ['refused', number(s.rejected_total)],
    ['prompt tokens cached, predicted', share(s.matched_tokens_total, s.prompt_tokens_total)],
    ['reported of predicted', share(s.observed_cached_tokens_total, s.predicted_cached_tokens_total)],
    ['feeds not live', number(dull), dull > 0],
  ];
  for (const role of ['prefill', 'decode']) {
    const of = s.workers.filter((w) => w.role === role);
    if (of.length) tiles.push([`${role}: running`, `${of.flatMap((w) => w.ranks).reduce((n, r) => n + r.active, 0)} (workers: ${of.length})`]);
  }
  const legs = Object.entries(s.prefill_legs_total || {});
  if (legs.length) tiles.push(['prefill legs', legs.map(([k, n]) => `${number(n)} ${k}`).join(', ')]);
  $('totals').replaceChildren(...tiles.map(([name, value, bad]) => el('div', bad ? 'bad' : '', el('dt', '', name), el('dd', '', value))));
}

// Ranks

function stateOf(w, r) {
  if (!w.ready || w.draining) return 'down';
  if (r.suspect) return 'suspect';
  if (w.tokenizer === 'differs') return 'differs';
  return r.feed === 'live' ? 'ok' : 'feed';
}

const nameOf = (w, r) => (r.rank === '' ? w.name : `${w.name}/${r.rank}`);
const usage = (r) => (r.kv_usage === undefined ? 'unknown' : `${Math.round(100 * r.kv_usage)} %`);

function grid(s) {
  const seen = new Set();
  for (const w of s.workers) {
    let b = boxes.get(w.name);
    if (!b) {
      b = { title: el('h3'), cells: el('div', 'cells') };
      b.box = el('div', 'worker', b.title, b.cells);
      boxes.set(w.name, b);
      $('grid').append(b.box);
    }
    seen.add(b);
    b.box.className = w.ready ? 'worker' : 'worker down';
    b.title.replaceChildren(w.name, el('span', 'role', w.role === 'both' ? '' : ` ${w.role}`));
    b.title.title = w.name;
    for (const r of w.ranks) {
      const key = nameOf(w, r);
      let c = cells.get(key);
      if (!c) {
        c = { button: el('button', 'cell'), box: b };
        c.button.tabIndex = -1;
        c.button.addEventListener('click', () => openRank(c));
        c.button.addEventListener('focus', () => reach(c.button));
        cells.set(key, c);
        b.cells.append(c.button);
      }
      seen.add(c);
      c.worker = w;
      c.rank = r;
      const state = stateOf(w, r);
      const label = `${key}: ${state}, KV cache ${usage(r)}, ${r.active} running, ${share(r.matched_tokens_total, r.prompt_tokens_total)} cached`;
      if (c.label === label) continue;
      c.label = label;
      c.state = state;
      c.button.className = `cell ${state}${r.kv_usage === undefined ? ' unknown' : ''}`;
      c.button.style.setProperty('--kv', `${Math.round(100 * (r.kv_usage || 0))}%`);
      c.button.textContent = r.active;
      c.button.title = label;
      c.button.setAttribute('aria-label', label);
    }
  }
  for (const [key, c] of cells) if (!seen.has(c)) { c.button.remove(); cells.delete(key); }
  for (const [key, b] of boxes) if (!seen.has(b)) { b.box.remove(); boxes.delete(key); }
  filter();
}

function filter() {
  const words = $('filter').value.toLowerCase();
  const problems = $('problems').checked;
  const shown = new Set();
  for (const [key, c] of cells) {
    const text = [key, c.worker.role, c.worker.engine, ...(c.worker.models || [])].join(' ').toLowerCase();
    const fits = text.includes(words) && (!problems || c.state !== 'ok');
    c.button.hidden = !fits;
    if (fits) shown.add(c.box);
  }
  for (const b of boxes.values()) b.box.hidden = !shown.has(b) && (cells.size > 0 && b.cells.childElementCount > 0);
  $('none').hidden = shown.size > 0 || cells.size === 0;
  if (!focused || !focused.isConnected || focused.hidden) reach(visible()[0]);
}

const visible = () => [...$('grid').querySelectorAll('button.cell:not([hidden])')];

// reach makes a cell the one that the tab key reaches.
function reach(button) {
  if (focused) focused.tabIndex = -1;
  focused = button || null;
  if (focused) focused.tabIndex = 0;
}

function move(e) {
  const list = visible();
  const at = list.indexOf(document.activeElement);
  if (at < 0) return;
  let to = -1;
  if (e.key === 'ArrowRight') to = at + 1;
  if (e.key === 'ArrowLeft') to = at - 1;
  if (e.key === 'Home') to = 0;
  if (e.key === 'End') to = list.length - 1;
  if (e.key === 'ArrowDown' || e.key === 'ArrowUp') {
    const here = list[at].getBoundingClientRect();
    let best = Infinity;
    list.forEach((b, i) => {
      const r = b.getBoundingClientRect();
      const dy = e.key === 'ArrowDown' ? r.top - here.top : here.top - r.top;
      const d = dy * 10 + Math.abs(r.left - here.left);
      if (dy > 4 && d < best) [best, to] = [d, i];
    });
  }
  if (to < 0 || to >= list.length) return;
  e.preventDefault();
  list[to].focus();
}

// Details

function pairs(list) {
  const dl = el('dl');
  for (const [name, value] of list) {
    if (value !== undefined && value !== '' && value !== null) dl.append(el('dt', '', name), el('dd', '', value));
  }
  return dl;
}

function show(title, ...body) {
  $('detail-title').textContent = title;
  $('detail-body').replaceChildren(...body);
  if (!$('detail').open) $('detail').showModal();
}

function openRank(c) {
  const [w, r] = [c.worker, c.rank];
  show(nameOf(w, r), pairs([
    ['address', w.address], ['engine', w.engine], ['role', w.role], ['models', (w.models || []).join(', ') + (w.more_models ? ` and ${w.more_models} more` : '')],
    ['ready', w.ready ? (w.draining ? 'draining' : 'yes') : 'no'], ['reason', w.reason], ['suspect', r.suspect ? 'yes' : ''],
    ['KV cache in use', usage(r)], ['blocks in the index', number(r.blocks)],
    ['running', number(r.active)], ['prefill tokens queued', number(r.queued_tokens)],
    ['prompt tokens', number(r.prompt_tokens_total)], ['of these cached, predicted', share(r.matched_tokens_total, r.prompt_tokens_total)],
    ['feed', r.feed || 'none'], ['last error of the feed', r.feed_error], ['tokenizer', w.tokenizer || 'not compared'],
    ...(w.warnings || []).map((text) => ['warning', text]),
  ]));
}

function table(names, lines) {
  const head = el('tr', '', ...names.map((n, i) => el('th', i ? 'n' : '', n)));
  return el('div', 'wide', el('table', '', el('thead', '', head), el('tbody', '', ...lines)));
}

function explained(x, title) {
  const chosen = [x.decode, x.prefill_target];
  const list = [...(x.candidates || [])].sort((a, b) => (a.cost ?? Infinity) - (b.cost ?? Infinity)).slice(0, 300);
  return [
    el('h3', '', title),
    ...(x.verdicts || []).map((v) => el('div', '', `${v.stage}: ${v.text}`)),
    x.error ? el('p', 'bad', x.error) : '',
    table(['target', 'cached', 'predicted', 'to compute', 'queued', 'resident', 'running', 'cost', 'dropped by'], list.map((c) =>
      el('tr', chosen.includes(c.target) ? 'chosen' : c.dropped ? 'dropped' : '', el('td', '', c.target),
        ...[c.tiers.reduce((a, b) => a + b, 0), c.speculative, c.miss, c.queue, c.kv, c.active, c.cost === undefined ? '–' : Math.round(c.cost), c.dropped || '']
          .map((v) => el('td', 'n', typeof v === 'number' ? number(v) : v))))),
    ...(x.prefill ? explained(x.prefill, 'Prefill target') : []),
  ];
}

async function openDecision(row) {
  let d;
  try {
    d = await (await ask(`debug/decisions/${encodeURIComponent(row.id)}`)).json();
  } catch (err) {
    show(row.id, el('p', 'bad', err.message));
    return;
  }
  show(row.id, pairs([
    ['request', `${d.method} ${d.path}, ${number(d.bytes)} bytes`], ['model', d.model], ['conversation', d.conversation],
    ['target', d.target && `${d.target} at ${d.endpoint} via ${d.via}`], ['prompt tokens', number(d.prompt_tokens)],
    ['cached, predicted', number(d.matched_tokens)], ['cached, reported', d.after.cached_tokens === undefined ? 'not yet' : number(d.after.cached_tokens)],
    ['prefill', d.prefill], ...(d.prefill_notes || []).map((n) => ['prefill', n]),
    ...(d.shadows || []).map((s) => [`shadow ${s.policy}`, `${s.target}, ${number(s.miss_tokens)} uncached tokens, estimated regret ${number(s.estimated_regret_tokens)}`]),
    ['degraded', d.degraded], ['refused', d.rejected ? `${d.rejected} ${d.reason}` : ''], ['detail', d.refusal],
    ['stages', d.stages.map((s) => `${s.stage} ${seconds(s.ns / 1e9)}`).join(', ')],
  ]), ...(d.explanation ? explained(d.explanation, 'Cost table')
    : [el('p', 'dim', 'No cost table: none was made, or it was reused. Fleets of more than 128 ranks explain every 64th decision.')]));
}

// Decisions

function fill(item) {
  const r = item.row;
  const outcome = r.reason || r.degraded || (r.ended ? r.status || 'aborted' : 'running');
  const open = el('button', '', r.id || 'without an id');
  open.addEventListener('click', () => openDecision(r));
  const focus = item.tr.contains(document.activeElement);
  item.tr.className = r.reason || (r.ended && !(r.status < 400)) ? 'bad' : r.degraded ? 'warn' : '';
  item.tr.replaceChildren(
    el('td', '', new Date(r.at).toLocaleTimeString('en-GB')), el('td', '', open), el('td', '', r.model || ''),
    ...[number(r.prompt_tokens), number(r.matched_tokens), r.cached_tokens === undefined ? '' : number(r.cached_tokens)].map((v) => el('td', 'n', v)),
    el('td', '', r.target || ''), el('td', '', r.prefill || ''),
    ...[r.waited_seconds, r.decision_seconds, r.duration_seconds].map((v) => el('td', 'n', seconds(v))), el('td', '', outcome));
  if (focus) open.focus();
}

function decided(list) {
  for (const row of list) {
    const key = `${row.at} ${row.id}`;
    const item = rows.get(key) || { tr: null };
    item.row = row;
    item.stale = true;
    rows.set(key, item);
  }
  for (const [key, item] of rows) {
    if (rows.size <= maxRows) break;
    rows.delete(key);
    if (item.tr) item.tr.remove();
  }
  if (!paused) draw();
}

function draw() {
  for (const item of rows.values()) {
    if (!item.stale) continue;
    item.stale = false;
    if (!item.tr) {
      item.tr = el('tr');
      $('rows').prepend(item.tr);
    }
    fill(item);
  }
}

async function follow() {
  for (;;) {
    try {
      const reader = (await ask('debug/stream?n=50')).body.pipeThrough(new TextDecoderStream()).getReader();
      let text = '';
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (text + value).split('\n\n');
        text = events.pop();
        decided(events.filter((e) => e.startsWith('data: ')).map((e) => JSON.parse(e.slice(6))));
      }
    } catch { /* the status says what is wrong */ }
    await new Promise((wake) => setTimeout(wake, 1000));
  }
}

function replicas(s) {
  $('replicas').hidden = !s.replicas;
  if (!s.replicas) return;
  const list = [{ id: `${s.replicas.replica} (this one)`, synced: s.replicas.synced, bookings: s.replicas.bookings, silent_seconds: 0 }, ...(s.replicas.replicas || [])];
  $('replicas').querySelector('tbody').replaceChildren(...list.map((r) => el('tr', r.synced ? '' : 'bad', el('td', '', r.id),
    el('td', '', r.synced ? 'shares' : 'not in step'), el('td', 'n', number(r.bookings)), el('td', 'n', seconds(r.silent_seconds)))));
}

function queue(s) {
  const pools = new Map((s.pools || []).map((p) => [p.model, p]));
  const list = [...(s.queue || [])];
  for (const model of pools.keys()) if (!list.some((c) => c.model === model)) list.push({ model, priority: 0, requests: 0, tokens: 0 });
  $('queue').hidden = !list.length;
  $('queue').querySelector('tbody').replaceChildren(...list.map((c) => {
    const p = pools.get(c.model);
    return el('tr', '', el('td', '', c.model || 'any'), ...[c.priority, number(c.requests), number(c.tokens), p ? share(p.saturation, 1) : '',
      p ? seconds(p.drain_ns / 1e9) : ''].map((v) => el('td', 'n', v)));
  }));
}

async function poll() {
  for (;;) {
    if (!document.hidden) {
      try {
        const s = await (await ask('debug/status')).json();
        $('version').textContent = s.version;
        say([s.not_ready ? `not ready: ${s.not_ready}` : 'ready', ...(s.warnings || [])].join('; '), Boolean(s.not_ready || s.warnings));
        totals(s, performance.now());
        grid(s);
        queue(s);
        replicas(s);
      } catch (err) {
        say(`no answer: ${err.message}`, true);
      }
    }
    await new Promise((wake) => setTimeout(wake, cells.size > 500 ? 2000 : 1000));
  }
}

$('filter').addEventListener('input', filter);
$('problems').addEventListener('change', filter);
$('grid').addEventListener('keydown', move);
$('pause').addEventListener('click', () => {
  paused = !paused;
  $('pause').setAttribute('aria-pressed', paused);
  $('pause').textContent = paused ? 'Resume' : 'Pause';
  if (!paused) draw();
});
$('login').addEventListener('submit', (e) => {
  e.preventDefault();
  sessionStorage.setItem('token', $('token').value);
  $('token').value = '';
});
document.addEventListener('keydown', (e) => {
  if (e.target.matches('input:not([type=checkbox])') || e.ctrlKey || e.metaKey || e.altKey || $('detail').open) return;
  if (e.key === '/') { e.preventDefault(); $('filter').focus(); }
  if (e.key === 'p') $('pause').click();
});
poll();
follow();
