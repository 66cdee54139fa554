"use strict";
// A model's Markdown as elements. marked makes HTML of it, KaTeX of its math, highlight.js of its code; DOMPurify lets
// through only the elements and attributes named here. HTML in the text stays text, and no picture is loaded.

const ATTRIBUTES = ("target rel class start align display mathvariant mathcolor mathbackground accent accentunder fence " +
  "separator stretchy symmetric largeop movablelimits form minsize maxsize lspace rspace width height depth voffset " +
  "scriptlevel displaystyle linethickness notation columnalign columnspacing columnlines rowspacing rowlines").split(" ");
const POLICY = {
  ALLOWED_TAGS: ("a p br hr strong em del code pre span sub sup h2 h3 h4 h5 h6 ul ol li blockquote table thead tbody tr th td " +
    "math mi mn mo ms mtext mspace mrow mfrac msqrt mroot mstyle mpadded mphantom menclose msub msup msubsup munder mover " +
    "munderover mtable mtr mtd").split(" "),
  ALLOWED_ATTR: ["href", ...ATTRIBUTES], ADD_URI_SAFE_ATTR: ATTRIBUTES,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};
const LINK = /^(?:https?:\/\/|mailto:)/i, TAG = /^<\/?(?:br|sub|sup) ?\/?>/i;
const LONGEST_CODE = 30_000;  // that is coloured, in characters
const LONGEST_TEXT = 100_000, LONG_LINE = /[^\n]{10000}/;  // beyond, a text is shown as it is: parsing may take seconds
const LOOKAHEAD = 2_000;  // in which math begins and ends, so that no text takes more than linear time
const DISPLAY = /^ {0,3}(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n|$)/;
const INLINE = /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\]|\\\(([^]+?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n])*?[^\s\\$])\$(?!\d))/;

function escaped(text) { return text.replace(/[&<>"']/g, letter => `&#${letter.charCodeAt(0)};`); }

function anchor(href, html, raw) {
  return LINK.test(href) ? `<a href="${escaped(href)}" target="_blank" rel="noopener noreferrer">${html}</a>` : escaped(raw);
}

function mathHtml({tex, raw, isDisplay}) {
  try {
    const html = katex.renderToString(tex, {output: "mathml", displayMode: isDisplay, strict: "ignore", maxSize: 20, maxExpand: 200});
    return html.replace(/<annotation[^]*?<\/annotation>/g, "");  // the source again
  } catch { return `<code>${escaped(raw)}</code>`; }
}

function mathExtension(name, level, pattern, begin) {
  return {
    name, level, renderer: mathHtml,
    start: text => { const at = text.slice(0, LOOKAHEAD).search(begin); return at < 0 ? undefined : at; },
    tokenizer: text => {
      const found = pattern.exec(text.slice(0, LOOKAHEAD));
      if (!found) return undefined;
      const tex = found.slice(1).find(part => part !== undefined), isDisplay = /^ *(?:\$\$|\\\[)/.test(found[0]);
      return {type: name, raw: found[0], tex, isDisplay};
    },
  };
}

const parser = new marked.Marked({
  gfm: true, breaks: true,
  extensions: [
    {name: "plain", renderer: ({raw}) => `<p class="plain">${escaped(raw)}</p>`},
    mathExtension("displayMath", "block", DISPLAY, /(?<=\n) {0,3}(?:\$\$|\\\[)/),
    mathExtension("inlineMath", "inline", INLINE, /\$|\\[[(]/),
  ],
  tokenizer: {
    html: () => undefined,
    tag: text => {
      const raw = TAG.exec(text)?.[0];
      return raw && {type: "html", raw, text: raw, block: false};
    },
  },
  renderer: {
    heading({tokens, depth}) { const name = `h${Math.min(depth + 1, 6)}`; return `<${name}>${this.parser.parseInline(tokens)}</${name}>`; },
    code({text, lang}) {
      const language = (lang ?? "").match(/^[\w+#.-]*/)[0];
      const isKnown = text.length <= LONGEST_CODE && hljs.getLanguage(language);
      const html = isKnown ? hljs.highlight(text, {language, ignoreIllegals: true}).value : escaped(text);
      return `<pre><code class="${language}">${html}</code></pre>`;
    },
    link({href, raw, tokens}) { return anchor(href, this.parser.parseInline(tokens), raw); },
    image({href, raw, text}) { return anchor(href, escaped(text || href), raw); },
    checkbox({checked}) { return checked ? "☑ " : "☐ "; },
  },
});

// Returns the blocks of a text as tokens.
function lex(text) {
  try { if (text.length <= LONGEST_TEXT && !LONG_LINE.test(text)) return parser.lexer(text); } catch { /* nested too deep */ }
  return [{type: "plain", raw: text}];
}

function toHtml(tokens) {
  try { return parser.parser(tokens); } catch { return parser.parser([{type: "plain", raw: tokens.map(({raw}) => raw).join("")}]); }
}

// Returns the elements of blocks.
function fromTokens(tokens) {
  const made = DOMPurify.sanitize(toHtml(tokens), POLICY);
  for (const pre of made.querySelectorAll("pre")) {
    const code = pre.firstChild, copy = button("Copy", self => copyText(code.textContent, self), {ariaLabel: "Copy this code"});
    const bar = element("div", {className: "bar"}, element("span", {textContent: code.className || "code"}), copy);
    const box = element("div", {className: "code"}, bar);
    pre.replaceWith(box);
    pre.tabIndex = 0;
    box.append(pre);
  }
  return made;
}

function markdown(text) { return fromTokens(lex(text)); }

// Returns a function that shows a growing text in an element. The two latest blocks are made again each time, those before
// are complete; so the whole takes linear time.
function growingMarkdown(parent) {
  let complete = 0, latest = [];
  return text => {
    const tokens = lex(text.slice(complete));
    for (const node of latest) node.remove();
    const blocks = tokens.flatMap((token, i) => token.type === "space" ? [] : [i]), first = blocks.at(-2) ?? 0;
    const done = tokens.slice(0, first);
    complete += done.reduce((sum, token) => sum + token.raw.length, 0);
    parent.append(fromTokens(done));
    const made = fromTokens(tokens.slice(first));
    latest = [...made.childNodes];
    parent.append(made);
  };
}
