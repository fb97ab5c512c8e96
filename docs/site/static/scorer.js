/* How the search orders pages that hold the same words: pages that answer questions first, tables of measurements last. */
var Scorer = {
  score: (result) => {
    const [page, , , , score] = result;
    if (/^(changelog|benchmarks|results|programs|first-step|single-steps|evaluation|streams|reinforcement|memory|packages|exports|reliability|backends|certify)$/.test(page)) return score - 4;
    if (page === "faq") return score + 2;
    if (page === "troubleshooting") return score + 0.5;
    if (/^(tutorials|notebooks|reference|start)\//.test(page) || /^coming-from/.test(page)) return score;
    return score + 1;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
